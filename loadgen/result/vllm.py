"""The names that users of `vllm bench serve` know, filled from a Summary.

There are two shapes. `flat_summary` is one arm in result.json. There, TTFT and E2EL count from the **intended** send
time, as everywhere in our reports, and `*_from_send_ms` stand beside them. `bench_json` is the file of `--save-result`.
There, each name means what it means in vLLM (`vllm/benchmarks/serve.py`), so TTFT and E2EL count from the **actual**
send time, and vLLM's `*_e2el_including_client_queue_ms` is our E2E. `mean_client_queue_time_ms` is the mean wait
before sending.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from loadgen.result.model import Arm, Distribution, Result, Summary

Json = str | int | float | bool | None | Sequence["Json"] | dict[str, "Json"]
Scalar = str | int | float | bool | None

BENCH_DEFINITIONS = (
    "ttft and e2el from the actual send time, as vllm bench serve; client_queue_time, ttft_from_intended and"
    " e2el_including_client_queue begin at the intended send time"
)


@dataclass(frozen=True, slots=True)
class Detailed:
    """Per-request values of `--save-detailed`, all in the same order; times in seconds, as vLLM writes them."""

    input_lens: Sequence[int]
    output_lens: Sequence[int]
    ttfts: Sequence[float]
    """Counted from the actual send time; 0.0 if no token came."""
    itls: Sequence[Sequence[float]]
    start_times: Sequence[float]
    errors: Sequence[str]
    """The empty text for a completed request."""
    generated_texts: Sequence[str] = ()

    def __post_init__(self) -> None:
        lengths = {len(self.input_lens), len(self.output_lens), len(self.ttfts), len(self.itls)}
        if len(lengths | {len(self.start_times), len(self.errors)}) != 1:
            raise ValueError("the lists of Detailed must have one entry for each request")


def flat_summary(summary: Summary) -> dict[str, Json]:
    """Return one arm under flat names; None: not measured. TTFT and E2EL count from the intended send time."""
    reuse, goodput = summary.reuse, summary.goodput
    distributions = {
        "ttft": summary.ttft,
        "ttft_from_send": summary.ttft_from_send,
        "tpot": summary.tpot,
        "itl": summary.itl,
        "e2el": summary.e2e,
        "e2el_from_send": summary.e2e_from_send,
        "lag": summary.lag,
    }
    return {
        **_counts(summary),
        "planned": summary.planned,
        "not_sent": summary.not_sent,
        "failures": dict(summary.failures),
        "total_cached_tokens": summary.cached_tokens,
        "request_goodput": goodput.request_goodput if goodput else None,
        "goodput_share": goodput.share if goodput else None,
        **{name: value for key, d in distributions.items() for name, value in flat_distribution(key, d).items()},
        "p99_ttft_with_failures_ms": summary.ttft.with_failures_p99_ms,
        "cached_token_rate": reuse.cached_token_rate,
        "counted_cached_token_rate": reuse.counted_rate,
        "attainable_cached_token_rate": reuse.attainable_rate,
        "achieved_share": reuse.achieved_share,
        "duplicate_prompts": reuse.duplicate_prompts,
        "duplicated_prefill_tokens": reuse.duplicated_prefill_tokens,
        "imbalance": summary.imbalance,
        "request_imbalance": summary.request_imbalance,
        "jain_index": summary.jain_index,
        "pods": {name: pod.model_dump(mode="json") for name, pod in summary.pods.items()},
        "valid": summary.validity.valid,
        "lag_share": summary.validity.lag_share,
        "lag_p99_share": summary.validity.lag_p99_share,
    }


def flat_distribution(name: str, distribution: Distribution) -> dict[str, float | None]:
    """Return `mean_<name>_ms`, `median_`, `std_`, `p90_`, `p95_`, `p99_` and the further percentiles requested."""
    d = distribution
    shown = {
        "mean": d.mean_ms,
        "median": d.median_ms,
        "std": d.std_ms,
        "p90": d.p90_ms,
        "p95": d.p95_ms,
        "p99": d.p99_ms,
    }
    further = {f"p{percent}": value for percent, value in d.percentiles_ms.items()}
    return {f"{statistic}_{name}_ms": value for statistic, value in {**further, **shown}.items()}


def bench_json(
    result: Result, arm: Arm, detailed: Detailed | None = None, metadata: dict[str, str] | None = None
) -> dict[str, Json]:
    """Return the content of `--save-result` in vLLM's order; as in vLLM, numbers are 0.0 if nothing completed."""
    s, given = arm.summary, result.configuration
    rate = given.get("request_rate")
    content: dict[str, Json] = {
        "date": datetime.fromisoformat(result.created).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": _text(given.get("backend")) or "openai-chat",
        "backend": _text(given.get("backend")) or "openai-chat",
        "label": _text(given.get("label")),
        "model_id": result.model,
        "tokenizer_id": _text(given.get("tokenizer")) or result.model,
        "num_prompts": s.planned,
        **(metadata or {}),
        "request_rate": rate if isinstance(rate, int | float) else "inf",
        "burstiness": _number(given.get("burstiness"), 1.0),
        "max_concurrency": _number(given.get("max_concurrency"), None),
        **_counts(s),
        "request_goodput": s.goodput.request_goodput if s.goodput else None,
    }
    for name, distribution in _as_vllm(s).items():
        content |= {key: value or 0.0 for key, value in flat_distribution(name, distribution).items()}
    content["mean_client_queue_time_ms"] = (s.ttft.mean_ms or 0.0) - (s.ttft_from_send.mean_ms or 0.0)
    if detailed:
        content |= _detailed(detailed)
    return content | {
        "warmroute": {**flat_summary(s), "definitions": BENCH_DEFINITIONS},
    }


def from_send(summary: Summary) -> tuple[Distribution, Distribution]:
    """Return TTFT and E2E as vLLM measures them; E2E counts from the intended time if that from the actual time was not
    measured."""
    measured = summary.e2e_from_send.mean_ms is not None
    return summary.ttft_from_send, summary.e2e_from_send if measured else summary.e2e


def _as_vllm(s: Summary) -> dict[str, Distribution]:
    ttft, e2e = from_send(s)
    return {
        "ttft": ttft,
        "tpot": s.tpot,
        "itl": s.itl,
        "e2el": e2e,
        "e2el_including_client_queue": s.e2e,
        "ttft_from_intended": s.ttft,
    }


def _counts(s: Summary) -> dict[str, Json]:
    return {
        "duration": s.duration_s,
        "completed": s.completed,
        "failed": s.failed,
        "total_input_tokens": s.prompt_tokens,
        "total_output_tokens": s.output_tokens,
        "request_throughput": s.request_throughput,
        "output_throughput": s.output_throughput,
        "total_token_throughput": s.total_token_throughput,
        "max_output_tokens_per_s": s.max_output_tokens_per_s,
        "max_concurrent_requests": s.max_concurrent_requests,
    }


def _detailed(d: Detailed) -> dict[str, Json]:
    return {
        "input_lens": list(d.input_lens),
        "output_lens": list(d.output_lens),
        "start_times": list(d.start_times),
        "ttfts": list(d.ttfts),
        "itls": [list(gaps) for gaps in d.itls],
        "generated_texts": list(d.generated_texts),
        "errors": list(d.errors),
    }


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _number(value: object, default: float | None) -> float | int | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default
