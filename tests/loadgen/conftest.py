"""Builders of values that the load generator's tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from loadgen.client import RequestRecord
from loadgen.compare import ArmResult, Comparison
from loadgen.config import CompareSettings
from loadgen.metrics import summarise
from loadgen.runner import ArmRun

MakeRecord = Callable[..., RequestRecord]
MakeComparison = Callable[..., Comparison]


@pytest.fixture(scope="session")
def make_record() -> MakeRecord:
    """A completed request of session `session` that took `ttft_s`; any field can be given."""

    def make(session: int = 0, turn: int = 0, ttft_s: float = 0.1, intended_s: float = 0.0, **fields: object):
        values = {
            "tenant": 0,
            "sent_s": intended_s,
            "first_token_s": intended_s + ttft_s,
            "finished_s": intended_s + ttft_s + 0.5,
            "prompt_tokens": 100,
            "cached_tokens": 40,
            "output_tokens": 11,
            "has_usage": True,
            "pod": "pod-0",
            "policy": "round_robin",
        }
        return RequestRecord(session=session, turn=turn, intended_s=intended_s, **{**values, **fields})  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def make_comparison() -> MakeComparison:
    """A comparison from each arm's records, all of the planned requests sent unless `planned` says otherwise."""

    def make(arms: dict[str, Sequence[RequestRecord]], planned: int | None = None) -> Comparison:
        pods = sorted({record.pod for records in arms.values() for record in records if record.pod})
        results = []
        for name, records in arms.items():
            run = ArmRun(tuple(records), planned or len(records), 0.0)
            results.append(ArmResult(name, run, summarise(run, pods)))
        settings = CompareSettings.model_validate({"url": "http://gateway:1", "policies": list(arms)})
        return Comparison(tuple(results), settings, "scripted", 2.0, "Caches were emptied.")

    return make
