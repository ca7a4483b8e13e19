"""Service-level objectives: which requests were good enough, counted over all offered requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from loadgen.measure.columns import Columns
from loadgen.result.model import Goodput

OBJECTIVES = ("ttft", "tpot", "e2el")


def parse_objectives(words: Sequence[str]) -> dict[str, float]:
    """Parse `ttft:500 tpot:50` (milliseconds) in the syntax of `vllm bench serve --goodput`. Raises ValueError."""
    objectives: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition(":")
        if name not in OBJECTIVES:
            raise ValueError(f"objective {word!r} must be NAME:MILLISECONDS with NAME one of {', '.join(OBJECTIVES)}")
        if name in objectives:
            raise ValueError(f"objective {name} is given twice")
        try:
            objectives[name] = float(value)
        except ValueError:
            raise ValueError(f"objective {word!r} must end in a number of milliseconds, such as {name}:500") from None
        if not 0 < objectives[name] < float("inf"):
            raise ValueError(f"objective {word!r} must be above 0 ms")
    return objectives


def good_requests(columns: Columns, objectives_ms: Mapping[str, float]) -> npt.NDArray[np.bool_]:
    """Return whether each request completed and met every objective; one-token answers meet any TPOT, as in vLLM.

    The TPOT of an answer without usage is not known, so it meets no such objective.
    """
    tpot_s = np.where(columns.has_usage, np.nan_to_num(columns.tpot_s), np.nan)
    measured_s = {"ttft": columns.ttft_s, "tpot": tpot_s, "e2el": columns.e2e_s}
    good = columns.completed.copy()
    for name, limit_ms in objectives_ms.items():
        # Allow a microsecond more: a latency is a difference of clock readings, which is exact to about that.
        good &= np.nan_to_num(measured_s[name], nan=np.inf) * 1000 <= limit_ms + 1e-3
    return good


def goodput(columns: Columns, objectives_ms: Mapping[str, float]) -> Goodput:
    """Return share and rate of good requests over every request in the schedule, sent or not."""
    good = int(good_requests(columns, objectives_ms).sum())
    return Goodput(
        objectives_ms=dict(objectives_ms),
        share=good / columns.offered if columns.offered else 0.0,
        request_goodput=good / columns.duration_s if columns.duration_s else 0.0,
    )
