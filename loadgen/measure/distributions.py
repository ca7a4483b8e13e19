"""Distributions of a quantity: mean, percentiles, and percentiles in which a failure counts as infinitely slow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from loadgen.result.model import Distribution

Floats = npt.NDArray[np.float64]

CDF_POINTS = np.linspace(0.0, 1.0, 101)


def percentile_name(percent: float) -> str:
    """Return the percentile as vLLM names it: '99', '99.9'; different ones have different names."""
    return str(int(percent)) if percent == int(percent) else str(percent)


def quantile_with_failures(sorted_values: Floats, failed: int, quantile: float) -> float:
    """Return the quantile with `failed` further infinite values; linear between order statistics, as in numpy.

    The result is infinite if the rank lies among the failures, and NaN if there are no values.
    """
    count = len(sorted_values) + failed
    if not count:
        return float("nan")
    rank = quantile * (count - 1)
    below, part = int(rank), rank - int(rank)
    above = below + 1 if part else below
    if above >= len(sorted_values):
        return float("inf")
    low, high = sorted_values[below], sorted_values[above]
    return float(low + (high - low) * part)


def distribution(
    values_s: Floats, *, failed: int = 0, percentiles: Sequence[float] = (), cdf: bool = False
) -> Distribution:
    """Convert seconds to milliseconds. `failed` changes only `with_failures_p99_ms`; `percentiles` are 0 to 100."""
    if not len(values_s):
        return Distribution()
    values = np.sort(values_s) * 1000
    median, p90, p95, p99 = np.quantile(values, (0.5, 0.9, 0.95, 0.99))
    honest = quantile_with_failures(values, failed, 0.99)
    return Distribution(
        mean_ms=float(values.mean()),
        median_ms=float(median),
        std_ms=float(values.std()),
        p90_ms=float(p90),
        p95_ms=float(p95),
        p99_ms=float(p99),
        percentiles_ms={percentile_name(p): float(np.quantile(values, p / 100)) for p in percentiles},
        cdf_ms=tuple(np.quantile(values, CDF_POINTS).tolist()) if cdf else (),
        with_failures_p99_ms=honest if np.isfinite(honest) else None,
    )
