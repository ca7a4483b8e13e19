"""Whether a run measured the server, or measured the load generator, or had too many failures."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from loadgen.measure.columns import Columns, Floats
from loadgen.result.model import Validity

MAX_LAG_SHARE = 0.05
"""If the generator's lag may be more than this share of a figure, the figure says too much about the generator."""
LATE_TWICE = 2.0
"""Only the lag of sending is known. An event loop that sends late reads about as late, so lag counts twice."""
MAX_FAILED_SHARE = 0.5
"""With more failures than this, the other requests are not a sample of the workload."""
_PERCENTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}


def in_words(found: Mapping[str, Validity]) -> str:
    """Return why runs are not reliable, by name, as one line that begins with INVALID; empty if all are valid."""
    reasons = [
        f"in {name} {reason}"
        for name, one in found.items()
        for reason in one.reasons or ("the result says so",)
        if not one.valid
    ]
    if not reasons:
        return ""
    advice = " Lower the rate, or give the generator its own machine, or more cores and --workers."
    return f"INVALID: {'; '.join(reasons)}.{advice if any(one.is_late for one in found.values()) else ''}"


def validity(columns: Columns, *, is_compared: bool = False) -> Validity:
    """Return every reason why the numbers are not reliable.

    The lag is compared with each figure of the TTFT. An arm that `is_compared` makes no claim of its own: its lag is
    only reported, and the comparison judges it (`loadgen.experiment.lateness`).
    """
    reasons = []
    failed = len(columns) - int(columns.completed.sum())
    if not columns.completed.any():
        reasons.append("no request completed")
    elif failed > MAX_FAILED_SHARE * len(columns):
        reasons.append(f"{failed} of {len(columns)} requests failed: the rest is not a sample of the workload")
    known = columns.completed & ~np.isnan(columns.ttft_s)
    ttft_s, lag_s = columns.ttft_s[known], columns.lag_s[known]
    if not known.any():
        return Validity(valid=not reasons, reasons=tuple(reasons))
    figure, share = lag_share(ttft_s, lag_s)
    is_late = share > MAX_LAG_SHARE and not is_compared
    if is_late:
        reasons.append(
            f"the load generator was late by {1000 * lag_s.mean():.1f} ms on average and {_p99_ms(lag_s):.1f} ms at"
            f" p99: that may be {share:.1%} of the {figure} TTFT, and {MAX_LAG_SHARE:.0%} is allowed"
        )
    return Validity(
        valid=not reasons,
        reasons=tuple(reasons),
        is_late=is_late,
        lag_share=share,
        lag_share_of=figure,
        lag_p99_share=_p99_ms(lag_s) / (1000 * float(np.median(ttft_s))) if np.median(ttft_s) > 0 else None,
    )


def lag_share(ttft_s: Floats, lag_s: Floats) -> tuple[str, float]:
    """Return the figure of the TTFT that the lag changes most, and how much of that figure may be lag, as a share.

    `ttft_s` counts from the intended send time, so each request's lag is a part of its TTFT. The effect of lag on a
    figure is how far the figure falls when every request's lag is subtracted. That holds for means and percentiles.
    """
    from_send_s = ttft_s - lag_s
    shares = {"mean": _share(float(ttft_s.mean()), float(from_send_s.mean()))}
    for name, q in _PERCENTILES.items():
        shares[name] = _share(float(np.quantile(ttft_s, q)), float(np.quantile(from_send_s, q)))
    most = max(shares, key=lambda name: shares[name])
    return most, shares[most]


def _share(with_lag_s: float, without_s: float) -> float:
    return LATE_TWICE * (with_lag_s - without_s) / with_lag_s if with_lag_s > 0 else 0.0


def _p99_ms(lag_s: Floats) -> float:
    return 1000 * float(np.quantile(lag_s, 0.99))
