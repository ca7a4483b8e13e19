"""What one arm measured, as numbers. The words for them are in `DEFINITIONS`, which every report prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.client import RequestRecord
from loadgen.runner import ArmRun

DEFINITIONS = {
    "cached_token_rate": "cached prompt tokens / prompt tokens, over completed requests, as the server's usage says",
    "ttft": "time to first token: from the intended send time to the first chunk with text (generator lag included)",
    "tpot": "time per output token after the first: (end - first token) / (output tokens - 1)",
    "e2e": "from the intended send time to the end of the answer",
    "lag": "generator lag: actual send time - intended send time; large values mean the generator was too slow",
    "request_throughput": "completed requests / duration, per second",
    "output_throughput": "output tokens of completed requests / duration, per second",
    "duration": "from the arm's start to the end of its last request",
    "imbalance": "largest / mean over the pods of the mean number of requests in flight; 1 is perfect balance",
    "request_imbalance": "largest / mean over the pods of the number of requests; 1 is perfect balance",
    "failed": "requests that ended without a complete answer, by reason; their latency is in no percentile",
    "not_sent": "follow-ups of a failed turn, and requests that the arm's time limit left over",
    "pods": "every pod that answered anywhere in the run; a pod that one arm never used counts there with zero",
}


@dataclass(frozen=True, slots=True)
class Distribution:
    """Milliseconds. All zero where nothing was measured."""

    mean_ms: float = 0.0
    median_ms: float = 0.0
    p90_ms: float = 0.0
    p99_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class PodLoad:
    """One pod's part in an arm."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    mean_in_flight: float = 0.0
    """Request-seconds in flight / duration of the arm."""


@dataclass(frozen=True, slots=True)
class ArmMetrics:
    """The summary of one arm."""

    planned: int
    completed: int
    failed: int
    not_sent: int
    failures: Mapping[str, int]
    duration_s: float
    request_throughput: float
    output_throughput: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cached_token_rate: float
    ttft: Distribution
    tpot: Distribution
    e2e: Distribution
    lag: Distribution
    imbalance: float
    request_imbalance: float
    pods: Mapping[str, PodLoad]


def ttft_s(record: RequestRecord) -> float:
    """Seconds from the intended send time to the first token of a completed request."""
    assert record.first_token_s is not None
    return record.first_token_s - record.intended_s


def completed(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """The requests that got a whole answer."""
    return [record for record in records if record.failure is None]


def summarise(run: ArmRun, pods: Sequence[str]) -> ArmMetrics:
    """The numbers of one arm; `pods` are all pods of the comparison, whether this arm used them or not."""
    done = completed(run.records)
    duration_s = max((record.finished_s for record in run.records), default=run.start_s) - run.start_s
    per_pod = {pod: _pod_load([r for r in run.records if r.pod == pod], duration_s) for pod in pods}
    prompt_tokens = sum(record.prompt_tokens for record in done)
    cached_tokens = sum(record.cached_tokens for record in done)
    output_tokens = sum(record.output_tokens for record in done)
    return ArmMetrics(
        planned=run.planned,
        completed=len(done),
        failed=len(run.records) - len(done),
        not_sent=run.planned - len(run.records),
        failures=dict(Counter(record.failure for record in run.records if record.failure)),
        duration_s=duration_s,
        request_throughput=_ratio(len(done), duration_s),
        output_throughput=_ratio(output_tokens, duration_s),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        output_tokens=output_tokens,
        cached_token_rate=_ratio(cached_tokens, prompt_tokens),
        ttft=distribution([ttft_s(record) for record in done]),
        tpot=distribution([tpot for record in done if (tpot := _tpot_s(record)) is not None]),
        e2e=distribution([record.finished_s - record.intended_s for record in done]),
        lag=distribution([record.sent_s - record.intended_s for record in run.records]),
        imbalance=imbalance([load.mean_in_flight for load in per_pod.values()]),
        request_imbalance=imbalance([load.requests for load in per_pod.values()]),
        pods=per_pod,
    )


def distribution(values_s: Sequence[float]) -> Distribution:
    """Mean and percentiles (linear interpolation between order statistics) of seconds, in milliseconds."""
    if not values_s:
        return Distribution()
    values = np.asarray(values_s) * 1000
    median, p90, p99 = np.percentile(values, [50, 90, 99])
    return Distribution(float(values.mean()), float(median), float(p90), float(p99))


def imbalance(loads: Sequence[float]) -> float:
    """Largest load / mean load: 1 in perfect balance, the number of pods when one has it all, 1 when there is none."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def _pod_load(records: Sequence[RequestRecord], duration_s: float) -> PodLoad:
    return PodLoad(
        requests=len(records),
        prompt_tokens=sum(record.prompt_tokens for record in records),
        cached_tokens=sum(record.cached_tokens for record in records),
        output_tokens=sum(record.output_tokens for record in records),
        mean_in_flight=_ratio(sum(record.finished_s - record.sent_s for record in records), duration_s),
    )


def _tpot_s(record: RequestRecord) -> float | None:
    if record.output_tokens < 2 or record.first_token_s is None:
        return None
    return (record.finished_s - record.first_token_s) / (record.output_tokens - 1)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
