"""Whether a run measured the server, or the load generator, or too little of anything."""

from __future__ import annotations

from loadgen.measure.columns import Columns
from loadgen.result.model import Distribution, Validity

MAX_LAG_SHARE = 0.05
"""A generator that is late by more than this share of the median TTFT has measured itself."""
MAX_FAILED_SHARE = 0.5
"""With more failures than this, what is left is no sample of the workload."""


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
            f"the load generator itself was late by {lag.p99_ms:.1f} ms (p99), {share:.0%} of the median TTFT of"
            f" {ttft.median_ms:.1f} ms; more than {MAX_LAG_SHARE:.0%} means that TTFT measures the generator."
            " Lower the rate, or give it more cores and --workers"
        )
    return Validity(valid=not reasons, reasons=tuple(reasons), lag_p99_share=share)
