"""The console block of `vllm bench serve` with its row names, so that existing parsers find their lines; then our own
block.

Every number in vLLM's block means the same as in vLLM: TTFT and E2EL count from the actual send time. Our own numbers
are in our block.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from loadgen.output.style.units import MISSING, clipped, count, milliseconds, number, percent
from loadgen.result.model import Distribution, Result, Summary
from loadgen.result.vllm import from_send

WIDTH = 50
MOST_PODS = 12
"""Maximum number of pods listed on the console; the JSON has all of them."""
Metric = tuple[str, str, str]
METRICS: tuple[Metric, ...] = (
    ("ttft", "TTFT", "Time to First Token"),
    ("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    ("itl", "ITL", "Inter-token Latency"),
    ("e2el", "E2EL", "End-to-end Latency"),
)


def vllm_block(result: Result, summary: Summary, metrics: Sequence[str]) -> str:
    """Return '=== Serving Benchmark Result ===' to the closing rule. `metrics`: from --percentile-metrics."""
    s = summary
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    lines += [_row("Successful requests:", str(s.completed)), _row("Failed requests:", str(s.failed))]
    concurrency, rate = result.configuration.get("max_concurrency"), result.configuration.get("request_rate")
    if isinstance(concurrency, int):
        lines.append(_row("Maximum request concurrency:", str(concurrency)))
    if isinstance(rate, int | float) and not isinstance(rate, bool):
        lines.append(_row("Request rate configured (RPS):", f"{rate:.2f}"))
    lines += [
        _row("Benchmark duration (s):", f"{s.duration_s:.2f}"),
        _row("Total input tokens:", str(s.prompt_tokens)),
        _row("Total generated tokens:", str(s.output_tokens)),
        _row("Request throughput (req/s):", f"{s.request_throughput:.2f}"),
    ]
    if s.goodput:
        lines.append(_row("Request goodput (req/s):", f"{s.goodput.request_goodput:.2f}"))
    lines += [
        _row("Output token throughput (tok/s):", f"{s.output_throughput:.2f}"),
        _row("Peak output token throughput (tok/s):", f"{s.max_output_tokens_per_s:.2f}"),
        _row("Peak concurrent requests:", f"{s.max_concurrent_requests:.2f}"),
        _row("Total token throughput (tok/s):", f"{s.total_token_throughput:.2f}"),
    ]
    ttft, e2el = from_send(s)
    found = {"ttft": ttft, "tpot": s.tpot, "itl": s.itl, "e2el": e2el}
    for key, short, title in METRICS:
        if key in metrics:
            lines += [f"{title:-^{WIDTH}}", *_latency_rows(short, found[key])]
    return "\n".join([*lines, "=" * WIDTH])


def our_block(summary: Summary) -> str:
    """Return what vLLM's block does not show: reuse, the generator's own lag, and pods."""
    return "\n".join([*_reuse_rows(summary), *_generator_rows(summary), *_pod_rows(summary), "=" * WIDTH])


def _row(name: str, value: str) -> str:
    return f"{name:<40} {value:<10}".rstrip()


def _latency_rows(short: str, d: Distribution) -> Iterator[str]:
    # vLLM prints 0.00 if nothing completed, because parsers expect a number.
    yield _row(f"Mean {short} (ms):", f"{d.mean_ms or 0.0:.2f}")
    yield _row(f"Median {short} (ms):", f"{d.median_ms or 0.0:.2f}")
    shown = {**d.percentiles_ms, "99": d.percentiles_ms.get("99", d.p99_ms or 0.0)}
    for percentile in sorted(shown, key=float):
        yield _row(f"P{percentile} {short} (ms):", f"{shown[percentile]:.2f}")


def _reuse_rows(s: Summary) -> Iterator[str]:
    reuse = s.reuse
    yield f"{'Prefix cache':-^{WIDTH}}"
    yield _row("Cached input tokens:", count(s.cached_tokens))
    yield _row("Cached share (usage):", percent(reuse.cached_token_rate))
    agree = {None: "", True: " (agrees)", False: " (DIFFERS)"}[reuse.counters_agree]
    yield _row("Cached share (pod counters):", percent(reuse.counted_rate) + agree)
    yield _row("Attainable (infinite shared cache):", percent(reuse.attainable_rate))
    yield _row("Achieved of attainable:", percent(reuse.achieved_share))
    yield _row("Duplicated prefill (tokens):", count(reuse.duplicated_prefill_tokens))
    yield _row("Duplicate prompts:", count(reuse.duplicate_prompts))


def _generator_rows(s: Summary) -> Iterator[str]:
    yield f"{'From the intended send time':-^{WIDTH}}"
    for name, d in (("TTFT", s.ttft), ("E2E", s.e2e), ("Generator lag", s.lag)):
        yield _row(f"Mean {name} (ms):", milliseconds(d.mean_ms))
        yield _row(f"P99 {name} (ms):", milliseconds(d.p99_ms))
    infinite = (
        "infinite" if s.failed and s.ttft.with_failures_p99_ms is None else milliseconds(s.ttft.with_failures_p99_ms)
    )
    yield _row("P99 TTFT, failures as infinite (ms):", infinite)
    yield _row("Lag p99 / median TTFT:", percent(s.validity.lag_p99_share))
    yield _row("Lag in a TTFT figure, at most:", percent(s.validity.lag_share))
    if s.goodput:
        yield _row("Good of offered requests:", percent(s.goodput.share))
    yield _row("Valid:", "yes" if s.validity.valid else "NO")
    for reason in s.validity.reasons:
        yield from textwrap.wrap(reason, WIDTH, initial_indent="  ", subsequent_indent="  ")


def _pod_rows(s: Summary) -> Iterator[str]:
    if not s.pods:
        return
    yield f"{'Pods':-^{WIDTH}}"
    yield f"{'pod':<22} {'requests':>8} {'cached':>8} {'in flight':>9}"
    busiest = sorted(s.pods, key=lambda name: (-s.pods[name].requests, name))
    for name in busiest[:MOST_PODS]:
        pod = s.pods[name]
        cached = percent(pod.cached_tokens / pod.prompt_tokens) if pod.prompt_tokens else MISSING
        yield f"{clipped(name, 22):<22} {count(pod.requests):>8} {cached:>8} {number(pod.mean_in_flight):>9}"
    if len(busiest) > MOST_PODS:
        yield f"  and {len(busiest) - MOST_PODS} more in result.json"
    yield _row("Imbalance of load (largest / mean):", number(s.imbalance))
    yield _row("Jain index of load:", number(s.jain_index))
