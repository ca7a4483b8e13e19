"""The bounds, and whether they are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["kept", "missed", "not measured"]

DECODE_SHARE_SMALL, DECODE_SHARE_LARGE = 0.80, 0.70
"""Shares of the bandwidth roofline, at batches up to `SMALL_BATCH` and beyond."""
SMALL_BATCH = 64
PREFILL_SHARE = 0.55
"""Share of the measured matmul rate."""
WARM_TTFT_S = 0.012
PROMOTION_RATIO = 1.3
"""Multiple of the least time, which is bytes / the measured PCIe rate."""
THROUGHPUT_RATIO = 2.0
"""Multiple of the throughput of transformers' continuous batching."""


@dataclass(frozen=True, slots=True)
class Check:
    """One bound."""

    what: str
    value: float | None
    """None: not measured in this run."""
    bound: float
    at_least: bool
    """Whether `bound` is a minimum; otherwise it is a maximum."""
    unit: str = ""

    @property
    def verdict(self) -> Verdict:
        """Return the verdict; a value of NaN keeps no bound."""
        if self.value is None:
            return "not measured"
        keeps = self.value >= self.bound if self.at_least else self.value <= self.bound
        return "kept" if keeps else "missed"

    def __str__(self) -> str:
        value = "-" if self.value is None else f"{self.value:.4g}{self.unit}"
        return f"{self.verdict:12} {self.what}: {value} ({'>=' if self.at_least else '<='} {self.bound:g}{self.unit})"


def decode_bound(batch: int) -> float:
    """Return the share of the roofline that decoding at this batch must reach."""
    return DECODE_SHARE_SMALL if batch <= SMALL_BATCH else DECODE_SHARE_LARGE


def exit_status(checks: Sequence[Check]) -> int:
    """Return 0: all measured bounds are kept; 1: a bound is missed; 2: nothing was measured."""
    verdicts = {check.verdict for check in checks}
    if "missed" in verdicts:
        return 1
    return 0 if "kept" in verdicts else 2
