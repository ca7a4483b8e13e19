"""What traces cost the gateway: with tracing off, with 1 % of the requests traced, with all of them traced.

    python -m tests.bench.gateway.bench_tracing

First come the steps that tracing adds to a request, in this process: CPU microseconds, the minimum of many rounds. Then
come whole gateways in turn, with the same scripted engines and a collector that takes all spans. The figures are the
process's CPU time per request, and its ratio to that of the gateway without tracing in the same repeat (geometric mean,
with the 95 % interval of the mean). A second gateway without tracing shows the resolution of the comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from multidict import CIMultiDict, CIMultiDictProxy

from engine.common.otel.environment import HTTP
from engine.common.otel.sampling import Sampling
from engine.common.otel.sdk import SpanExport, resource_of
from engine.common.otel.tracer import Span, Tracer
from engine.contract.requests import Endpoint
from router.edge.headers import UpstreamHeaders
from router.engines.attempt_result import DONE
from router.forwarding.exchange import Arrival, Attempt, Exchange
from router.forwarding.tracing import spans_of
from tests.bench.gateway.bench_gateway import MODULE, measure, started, wait_ready
from tests.engine.common.otel.collector import running_collector

PODS = 8
ROUND = 2_000
ROUNDS = 30
SENT = 800
"""Requests whose spans fit the queue."""
SENDINGS = 10
ARMS = {"off": {}, "off again": {}, "1 %": {"OTEL_TRACES_SAMPLER_ARG": "0.01"}, "all": {"OTEL_TRACES_SAMPLER_ARG": "1"}}
FIELDS = {"Host": "bench", "Content-Type": "application/json", "Accept": "*/*", "User-Agent": "x", "X-A": "b"}

PATIENT = '{"probe_timeout_s": 30.0, "connect_timeout_s": 30.0}'


def least_us(call: Callable[[], object]) -> float:
    """Return the CPU microseconds of one call, in the fastest round."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(ROUND):
            call()
        best = min(best, time.process_time() - began)
    return 1e6 * best / ROUND


def an_exchange() -> Exchange:
    """Return an exchange that has ended after one attempt."""
    exchange = Exchange(Arrival("0123456789abcdef", 100.0, 200.0))
    choice = SimpleNamespace(
        pod=SimpleNamespace(pod_id="pod-1"),
        policy="predicted_ttft",
        cached_tokens=1536,
        decision=SimpleNamespace(predicted_ttft_s=0.05, rival=None),
    )
    attempt = Attempt(cast(Any, None), cast(Any, choice), cast(Any, None), 100.001)
    attempt.first_byte_s, attempt.ended_s, attempt.result = 100.05, 101.0, DONE
    attempt.span_id = 7
    exchange.attempts.append(attempt)
    exchange.status, exchange.first_byte_s = 200, 100.05
    return exchange


def steps() -> None:
    """Print the cost per request, step by step."""
    incoming = CIMultiDictProxy(CIMultiDict(FIELDS))
    raw = tuple((name.encode(), value.encode()) for name, value in FIELDS.items())
    upstream = UpstreamHeaders(passes_authorization=True)
    exchange = an_exchange()

    def sends(trace: bytes | None) -> object:
        return upstream.of(raw, "0123456789abcdef", None, None, trace)

    def ignore(span: Span) -> None:
        """Discard the span."""

    def traced(tracer: Tracer) -> None:
        trace = tracer.begin(incoming)
        sends(trace.fields(trace.child_id()))
        if trace.is_sampled:
            tracer.end(spans_of(trace, exchange, Endpoint.CHAT, 101.0))

    base = least_us(lambda: sends(None))
    none = Tracer(Sampling(0.0), ignore)
    unsampled = least_us(lambda: traced(none)) - base
    sampled = []
    with running_collector() as collector:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector.http
        for _ in range(SENDINGS):
            export = SpanExport(HTTP, resource_of("bench", "bench"))
            tracer = Tracer(Sampling(1.0), export)
            began = time.process_time()  # CPU time of all threads
            for _ in range(SENT):
                traced(tracer)
            export.close()
            sampled.append(1e6 * (time.process_time() - began) / SENT - base)
        del os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"]
    print(f"not sampled: {unsampled:.2f} us a request; sampled, two spans made and sent: {min(sampled):.0f} us")
    print(f"at 1 %: {0.99 * unsampled + 0.01 * min(sampled):.2f} us a request", flush=True)


def compare(repeats: int, count: int) -> None:
    """Print each arm's CPU per request beside that of the gateway without tracing."""
    with contextlib.ExitStack() as running:
        collector = running.enter_context(running_collector())
        engines, _ = running.enter_context(started(sys.executable, "-m", MODULE, "engines", str(PODS)))
        arms = {}
        for name, more in ARMS.items():
            asked = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.http, "OTEL_TRACES_SAMPLER": "traceidratio", **more}
            variables = [f"{key}={value}" for key, value in asked.items()] if more else []
            arms[name] = running.enter_context(
                started(
                    "env",
                    *variables,
                    sys.executable,
                    "-m",
                    "tests.router.rig.gateway_program",
                    PATIENT,
                    "--port=0",
                    "--engines",
                    engines,
                )
            )
            wait_ready(arms[name][0], PODS)
        used: dict[str, list[float]] = defaultdict(list)
        for url, _ in arms.values():
            measure(url, None, 300, 32, "stream")
        for repeat in range(repeats):
            order = list(arms) if repeat % 2 else list(arms)[::-1]
            for name in order:
                url, process = arms[name]
                used[name].append(measure(url, process, count, 32, "stream")["cpu_us"])
        spans = len(collector.everything()["spans"])
    for name, cpu in used.items():
        logs = [math.log(mine / base) for mine, base in zip(cpu, used["off"], strict=True)]
        mean, off_by = statistics.fmean(logs), 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
        print(
            f"{name:9} CPU {statistics.median(cpu):6.0f} us a request, {math.exp(mean):.3f} times that without"
            f" tracing ({math.exp(mean - off_by):.3f} to {math.exp(mean + off_by):.3f})"
        )
    print(f"{spans} spans arrived", flush=True)


def main() -> None:
    """Print the cost of each step and of whole gateways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40, help="repeats of each gateway, at least 2 (default 40)")
    parser.add_argument("--count", type=int, default=400, help="requests of a repeat (default 400)")
    args = parser.parse_args()
    steps()
    compare(args.repeats, args.count)


if __name__ == "__main__":
    main()
