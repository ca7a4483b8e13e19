"""Whether a run measured the server, or the load generator, or too little of anything."""

from __future__ import annotations

from collections.abc import Mapping

from loadgen.measure.columns import Columns
from loadgen.result.model import Distribution, Validity

MAX_LAG_SHARE = 0.05
"""A generator that is late by more than this share of the median TTFT has measured itself."""
MAX_FAILED_SHARE = 0.5
"""With more failures than this, what is left is no sample of the workload."""


def in_words(found: Mapping[str, Validity]) -> str:
    """Why runs must not be relied on, by name, in one line that begins with INVALID; empty where all are valid."""
    reasons = [f"in {name} {reason}" for name, one in found.items() for reason in one.reasons or ("it is marked so",)
               if not one.valid]  # fmt: skip
    if not reasons:
        return ""
    is_late = any((one.lag_p99_share or 0) > MAX_LAG_SHARE for one in found.values())
    advice = (
        f" Above {MAX_LAG_SHARE:.0%} TTFT measures the generator: lower the rate, or give it more cores and --workers."
    )
    return f"INVALID: {'; '.join(reasons)}.{advice if is_late else ''}"


def validity(columns: Columns, lag: Distribution, ttft: Distribution) -> Validity:
    """Every reason why the numbers must not be relied on."""
    reasons = []
    failed = len(columns) - int(columns.completed.sum())
    share = lag.p99_ms / ttft.median_ms if lag.p99_ms is not None and ttft.median_ms else None
    if not columns.completed.any():
        reasons.append("no request completed")
    elif failed > MAX_FAILED_SHARE * len(columns):
        reasons.append(f"{failed} of {len(columns)} requests failed: the rest are no sample of the workload")
    if share is not None and share > MAX_LAG_SHARE:
        reasons.append(
            f"the load generator was late by {lag.p99_ms:.1f} ms (p99), {share:.1%} of the median TTFT of"
            f" {ttft.median_ms:.1f} ms"
        )
    return Validity(valid=not reasons, reasons=tuple(reasons), lag_p99_share=share)
