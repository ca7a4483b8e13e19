"""Requests and runs made by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.measure.records import RecordLog, Records, RequestRecord


@dataclass(frozen=True)
class MadeRun:
    """The part of `loadgen.load.player.ArmRun` that summaries read."""

    records: Records
    planned: int | None
    duration_s: float


def request(
    session: int = 0, turn: int = 0, ttft_s: float = 0.1, intended_s: float = 0.0, **fields: Any
) -> RequestRecord:
    """Return a completed request that answered 11 tokens, ten of them within 0.5 s after the first."""
    values = {
        "group": "",
        "sent_s": intended_s,
        "first_token_s": intended_s + ttft_s,
        "finished_s": intended_s + ttft_s + 0.5,
        "prompt_tokens": 100,
        "cached_tokens": 40,
        "output_tokens": 11,
        "has_usage": True,
        "pod": "pod-0",
    }
    return RequestRecord(session=session, turn=turn, intended_s=intended_s, **{**values, **fields})


def failed(
    session: int = 0, turn: int = 0, intended_s: float = 0.0, why: str = "http 503", **fields: Any
) -> RequestRecord:
    """Return a request that got no answer."""
    nothing = {"first_token_s": None, "has_usage": False, "prompt_tokens": 0, "cached_tokens": 0, "output_tokens": 0}
    values = {**nothing, "finished_s": intended_s + 0.01, "failure": why, "detail": f"{why}, says the server"}
    return request(session, turn, intended_s=intended_s, **{**values, **fields})


def records_of(records: Iterable[RequestRecord], start_s: float = 0.0, *, keep_gaps: bool = True) -> Records:
    """Return the columns of the given records."""
    with RecordLog(start_s, keep_gaps=keep_gaps) as log:
        for record in records:
            log.add(record)
        return log.finish()


def made_run(requests: Sequence[RequestRecord], planned: int | None = None, duration_s: float | None = None) -> MadeRun:
    """Return a run in which all planned requests were sent, unless `planned` says otherwise."""
    last_s = max((r.finished_s for r in requests), default=0.0)
    return MadeRun(records_of(requests), len(requests) if planned is None else planned, duration_s or last_s)
