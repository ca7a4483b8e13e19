"""Results as commands make them, but without a run: consistent numbers drawn from a seed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from loadgen.measure.validity import MAX_LAG_SHARE, lag_share
from loadgen.result.model import (
    Arm,
    Contrast,
    Distribution,
    Goodput,
    Interval,
    PodShare,
    Result,
    Reuse,
    Summary,
    SweepPoint,
    TimeSeries,
    Validity,
)

OBJECTIVES = {"ttft": 500.0, "tpot": 50.0}
ODD_NAMES = ("<b>&\"'</b>", "日本語 🦊 ünï | `code`", "a" * 120, "[link](x) *star* [red]markup[/red]")
COMPARED = (
    ("ttft_mean_ms", "lower"),
    ("ttft_p99_ms", "lower"),
    ("tpot_mean_ms", "lower"),
    ("e2e_mean_ms", "lower"),
    ("cached_token_rate", "higher"),
    ("request_throughput", "higher"),
    ("goodput_share", "higher"),
)


def distribution(values: Sequence[float] | np.ndarray[Any, Any], cdf: bool = True) -> Distribution:
    """Return the distribution of values in milliseconds."""
    if not len(values):
        return Distribution()
    p50, p90, p95, p99 = (float(p) for p in np.percentile(values, [50, 90, 95, 99]))
    return Distribution(
        mean_ms=float(np.mean(values)),
        median_ms=p50,
        std_ms=float(np.std(values)),
        p90_ms=p90,
        p95_ms=p95,
        p99_ms=p99,
        percentiles_ms={"99.9": float(np.percentile(values, 99.9))},
        cdf_ms=tuple(float(v) for v in np.percentile(values, range(101))) if cdf else (),
        with_failures_p99_ms=p99,
    )


FAILURE_DETAILS = {"timeout": "no answer within <60 s>", "http 429": "queue full & busy"}


def summary(
    name: str = "a",
    *,
    slow: float = 1.0,
    hit: float = 0.5,
    pods: int = 4,
    requests: int = 400,
    failed: int = 0,
    duration_s: float = 60.0,
    skew: float = 0.2,
    goodput: bool = True,
    detail: bool = True,
    lag_ms: float = 0.4,
) -> Summary:
    """`slow` scales the latencies, `hit` is the cached share, `skew` is how unevenly the pods are loaded."""
    random = np.random.default_rng(zlib.crc32(f"{name} {slow} {requests}".encode()))
    done = requests - failed
    sent = random.lognormal(np.log(300 * slow), 0.7, done)
    lag = random.exponential(lag_ms, done)
    ttft = sent + lag
    tpot = random.normal(22 * (0.9 + slow / 10), 2, done).clip(1)
    e2e = ttft + tpot * 63
    good = int(((ttft <= OBJECTIVES["ttft"]) & (tpot <= OBJECTIVES["tpot"])).sum())
    prompt, output = done * 2000, done * 64
    weights = _weights(pods, skew)
    in_flight = 16 * slow * weights
    names = [f"warmroute-engine-7c9d8b-{i:02}" for i in range(pods)]
    shares = _pod_shares(dict(zip(names, zip(weights, in_flight, strict=True), strict=True)), done, prompt, output, hit)
    return Summary(
        planned=requests,
        completed=done,
        failed=failed,
        not_sent=0,
        failures={"timeout": failed - failed // 3, "http 429": failed // 3} if failed else {},
        failure_details=FAILURE_DETAILS if failed else {},
        duration_s=duration_s,
        request_throughput=done / duration_s,
        output_throughput=output / duration_s,
        total_token_throughput=(prompt + output) / duration_s,
        max_concurrent_requests=41,
        max_output_tokens_per_s=output / duration_s * 1.7,
        prompt_tokens=prompt,
        cached_tokens=round(prompt * hit),
        output_tokens=output,
        ttft=distribution(ttft, detail),
        ttft_from_send=distribution(sent, detail),
        tpot=distribution(tpot, detail),
        itl=distribution(tpot * 1.02, detail),
        e2e=distribution(e2e, detail),
        e2e_from_send=distribution(e2e - lag, detail),
        lag=distribution(lag, detail),
        imbalance=float(in_flight.max() / in_flight.mean()),
        request_imbalance=float(weights.max() * pods),
        jain_index=float(in_flight.sum() ** 2 / (pods * (in_flight**2).sum())),
        pods=shares,
        reuse=_reuse(hit, prompt, is_known=done > 0),
        goodput=_goodput(good, requests, duration_s) if goodput else None,
        validity=_validity(lag, ttft),
        series=_series(random, names, in_flight, hit, duration_s, requests) if detail and done else None,
    )


def _goodput(good: int, requests: int, duration_s: float) -> Goodput:
    return Goodput(objectives_ms=OBJECTIVES, share=good / requests, request_goodput=good / duration_s)


def _weights(pods: int, skew: float) -> np.ndarray:
    """Return each pod's share of the requests."""
    weights = np.array([1 + skew * ((i * 7) % pods) for i in range(pods)])
    weights /= weights.sum()
    return weights


def _pod_shares(
    pods: Mapping[str, tuple[float, float]], done: int, prompt: int, output: int, hit: float
) -> dict[str, PodShare]:
    """`pods`: each pod's share of the requests, and its mean of requests in flight."""
    return {
        pod: PodShare(
            requests=round(done * share),
            prompt_tokens=round(prompt * share),
            cached_tokens=round(prompt * share * hit),
            output_tokens=round(output * share),
            mean_in_flight=float(load),
            max_in_flight=int(load * 2.5) + 1,
            counted_prompt_tokens=round(prompt * share),
            counted_cached_tokens=round(prompt * share * hit),
        )
        for pod, (share, load) in pods.items()
    }


def _reuse(hit: float, prompt: int, *, is_known: bool) -> Reuse:
    return Reuse(
        cached_token_rate=hit if is_known else None,
        counted_rate=hit + 0.004 if is_known else None,
        counters_agree=True if is_known else None,
        attainable_rate=0.83,
        achieved_share=hit / 0.83 if is_known else None,
        duplicate_prompts=3,
        duplicated_prefill_tokens=round(prompt * (0.83 - hit) * 0.8) if hit < 0.83 else 0,
    )


def _validity(lag: np.ndarray, ttft: np.ndarray) -> Validity:
    if not len(ttft):
        return Validity(valid=False, reasons=("nothing completed",))
    figure, share = lag_share(ttft, lag)
    is_late = share > MAX_LAG_SHARE
    reasons = (f"generator lag may be {share:.0%} of the {figure} TTFT",) if is_late else ()
    return Validity(valid=not reasons, reasons=reasons, is_late=is_late, lag_share=share, lag_share_of=figure)


def _series(
    random: np.random.Generator, pods: list[str], load: np.ndarray, hit: float, duration_s: float, requests: int
) -> TimeSeries:
    buckets, bucket_s = 60, duration_s / 60
    rise = 1 - np.exp(-np.arange(buckets) / 8)
    return TimeSeries(
        bucket_s=bucket_s,
        in_flight={
            pod: tuple(float(v) for v in (mean * rise * random.gamma(8, 1 / 8, buckets)))
            for pod, mean in zip(pods, load, strict=True)
        },
        cached_token_rate={
            pod: tuple(
                None if random.random() < 0.06 else float(v)
                for v in (hit * rise + random.normal(0, 0.05, buckets)).clip(0, 1)
            )
            for pod in pods
        },
        request_rate=tuple(float(v) for v in random.poisson(requests / 60, buckets) / bucket_s),
    )


ARMS = {
    "round_robin": (1.0, 0.31),
    "least_loaded": (0.93, 0.33),
    "affinity_groups": (0.42, 0.71),
    "predicted_ttft": (0.39, 0.74),
}


def arm(name: str, slow: float = 1.0, hit: float = 0.5, blocks: int = 4, pods: int = 4, **more: object) -> Arm:
    """Return an arm with `blocks` blocks and, with at least two, a band around its quantiles."""
    whole = summary(name, slow=slow, hit=hit, pods=pods, **more)  # type: ignore[arg-type]
    parts = [
        summary(
            f"{name}{i}", slow=slow * (0.95 + 0.03 * i), hit=hit, pods=pods, requests=100, duration_s=15, detail=False
        )
        for i in range(blocks)
    ]
    cdf = np.array(whole.ttft.cdf_ms)
    return Arm(
        name=name,
        url="http://gateway.example:8080",
        policy=name,
        summary=whole,
        blocks=tuple(parts),
        ttft_cdf_low_ms=tuple(float(v) for v in cdf * 0.9) if blocks > 1 else (),
        ttft_cdf_high_ms=tuple(float(v) for v in cdf * 1.12) if blocks > 1 else (),
    )


def contrasts(arms: Sequence[Arm], intervals: bool = True) -> tuple[Contrast, ...]:
    """Compare every arm with the first."""
    found = []
    for metric, better in COMPARED:
        for other in arms[1:]:
            a, b = _value(other.summary, metric), _value(arms[0].summary, metric)
            if a is None or not b:
                continue
            ratio, width = a / b, 0.07
            clear = abs(ratio - 1) > width
            found.append(
                Contrast(
                    metric=metric,
                    better=better,
                    baseline=arms[0].name,
                    arm=other.name,
                    pairs=4,
                    difference=_interval(a - b, abs(b) * width, intervals),
                    ratio=_interval(ratio, width, intervals),
                    judgement="not distinguishable"
                    if not clear
                    else "better"
                    if (ratio < 1) == (better == "lower")
                    else "worse",
                )
            )
    return tuple(found)


def _interval(value: float, half: float, wanted: bool) -> Interval:
    return Interval(value=value, low=value - half, high=value + half) if wanted else Interval(value=value)


def _value(s: Summary, metric: str) -> float | None:
    flat = {
        "ttft_mean_ms": s.ttft.mean_ms,
        "ttft_p99_ms": s.ttft.p99_ms,
        "tpot_mean_ms": s.tpot.mean_ms,
        "e2e_mean_ms": s.e2e.mean_ms,
        "cached_token_rate": s.reuse.cached_token_rate,
        "request_throughput": s.request_throughput,
        "goodput_share": s.goodput.share if s.goodput else None,
    }
    return flat[metric]


def result(command: str = "compare", **changes: object) -> Result:
    """Return a Result with the given fields."""
    fields = {
        "command": command,
        "created": "2026-03-01T12:30:00+00:00",
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "seed": 7,
        "configuration": {
            "url": "http://gateway.example:8080",
            "workload": "shared_prefix",
            "session_rate": 2.5,
            "burstiness": 1.0,
            "policies": list(ARMS),
            "max_time_s": None,
            "ignore_eos": True,
            "api_key": "(set)",
        },
        "workload": {"name": "shared system prompt", "tenants": "8", "prompt": "about 2,000 tokens, 64 out"},
        "facts": {"machine": "16 cores", "servers": "4 pods"},
        "isolation": "caches reset before each block",
        "definitions": {
            "ttft": "time to first token: from the intended send time to the first chunk of a token",
            "jain_index": "(sum x)^2 / (n sum x^2) over the pods' mean requests in flight",
        },
    }
    return Result.model_validate(fields | changes)


def comparison(pods: int = 4, names: Sequence[str] = tuple(ARMS), blocks: int = 4, **more: object) -> Result:
    """Return four arms with four blocks each, unless the arguments say otherwise."""
    shapes = list(ARMS.values())
    arms = tuple(
        arm(name, *shapes[i % len(shapes)], blocks=blocks, pods=pods, skew=0.4 if i == 0 else 0.1)
        for i, name in enumerate(names)
    )
    order = [name for i in range(blocks) for name in (names if i % 2 == 0 else list(reversed(names)))]
    return result(
        "compare",
        baseline=names[0],
        order=tuple(order),
        arms=arms,
        contrasts=contrasts(arms),
        verdict=(
            f"{names[-1]} won: mean TTFT 151 ms against 390 ms with {names[0]}, 0.39 times (0.32 to 0.46).",
            f"{names[1]}: not distinguishable from {names[0]}." if len(names) > 1 else "It ran alone.",
        ),
        cautions=("least_loaded begins its answers sooner but ends them later.",),
        **more,
    )


def bench(pods: int = 4, **more: object) -> Result:
    """Return a Result with one arm."""
    one = arm("bench", 0.8, 0.6, blocks=0, pods=pods, **more)
    given = {"request_rate": 8.0, "burstiness": 1.0, "max_concurrency": 64, "num_prompts": 400, "label": None}
    return result("bench", arms=(one,), configuration=given, verdict=("400 requests in 60.0 s.",))


def sweep() -> Result:
    """Return eight rates and two arms, with a knee."""
    points, arms = [], []
    for name, knee, hit in (("round_robin", 9, 0.3), ("affinity_groups", 17, 0.7)):
        for rate in (2, 4, 6, 8, 10, 14, 18, 24):
            slow = 0.5 * hit / 0.5 + (0.04 * rate if rate < knee else 0.3 * (rate - knee + 4))
            found = summary(
                name, slow=slow, hit=hit, requests=rate * 30, duration_s=30 * max(1, rate / knee), detail=False
            )
            points.append(
                SweepPoint(arm=name, rate=float(rate), concurrency=None, summary=found, saturated=rate > knee)
            )
        arms.append(arm(name, 1.0 if hit < 0.5 else 0.5, hit, blocks=0))
    return result(
        "sweep", arms=tuple(arms), sweep=tuple(points), verdict=("affinity_groups bears 17 req/s, round_robin 9.",)
    )


def with_failures() -> Result:
    """Return a comparison in which one arm lost requests and another was measured by a late generator."""
    arms = (
        arm("round_robin", 1.0, 0.3),
        arm("cache_aware", 0.5, 0.7, failed=37),
        arm("late", 0.9, 0.4, lag_ms=120.0),
    )
    return result(
        "compare",
        baseline="round_robin",
        order=("round_robin", "cache_aware", "late", "late", "cache_aware", "round_robin"),
        arms=arms,
        contrasts=contrasts(arms, intervals=False),
        verdict=("No arm can be judged.",),
        cautions=("cache_aware failed 37 of 400 requests.", "late: the load generator was late."),
    )


def nothing_completed() -> Result:
    """Return a Result in which every request of every arm failed."""
    arms = tuple(
        arm(name, requests=12, failed=12, blocks=0, goodput=False, pods=2) for name in ("round_robin", "other")
    )
    bare = tuple(
        one.model_copy(update={"summary": one.summary.model_copy(update={"pods": {}, "duration_s": 0.0})})
        for one in arms
    )
    return result("compare", baseline="round_robin", arms=bare, verdict=("Nothing completed.",))


def odd_names() -> Result:
    """Return a Result whose names have markup, Unicode and 120 letters."""
    return comparison(names=ODD_NAMES)


BUILDERS: dict[str, Callable[[], Result]] = {
    "comparison": comparison,
    "one_pod": lambda: comparison(pods=1),
    "many_pods": lambda: comparison(pods=64),
    "many_arms": lambda: comparison(names=[f"policy_{i}" for i in range(10)]),
    "one_arm": lambda: comparison(names=["alone"]),
    "bench": bench,
    "bench_failing": lambda: bench(failed=23),
    "sweep": sweep,
    "with_failures": with_failures,
    "nothing_completed": nothing_completed,
    "odd_names": odd_names,
    "no_arms": lambda: result("bench", arms=()),
}
NAMES = tuple(BUILDERS)
"""Every kind of Result that outputs must handle."""


@cache
def named(name: str) -> Result:
    """Return the Result with this name."""
    return BUILDERS[name]()
