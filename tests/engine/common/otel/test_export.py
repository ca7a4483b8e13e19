"""Spans on their way to a collector that takes them, refuses them or hangs."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from multidict import CIMultiDict

from engine.common.otel import running
from engine.common.otel.running import tracing
from engine.common.otel.tracer import Span, SpanKind, Trace, Tracer
from engine.common.settings import ConfigError
from engine.model.checkpoint import make_checkpoint
from tests.e2e.programs import Program
from tests.e2e.programs import running as programs
from tests.engine.common.otel.collector import LONGEST_HANG_S, Collector

NEVER_MS = "600000"
"""The time between two batches is so long that a program sends only at its end."""
STOPS_WITHIN_S = LONGEST_HANG_S - 10.0
"""This is enough on a busy machine; a program that waited for the collector would take longer."""
BOTH = pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])


def use(monkeypatch: pytest.MonkeyPatch, collector: Collector, protocol: str, **more: str) -> None:
    given = {"EXPORTER_OTLP_ENDPOINT": collector.grpc if protocol == "grpc" else collector.http}
    for name, value in {**given, "EXPORTER_OTLP_PROTOCOL": protocol, **more}.items():
        monkeypatch.setenv(f"OTEL_{name}", value)


def wait_for_threads() -> None:
    """Wait until the sending threads have ended, so that none still runs in another test."""
    for thread in threading.enumerate():
        if thread.name.startswith(("telemetry-", "Otel")):
            thread.join(30.0)
            assert not thread.is_alive(), thread.name


def told(tracer: Tracer | None, count: int) -> Trace:
    """End a trace with a request's span and `count` child spans."""
    assert tracer is not None
    trace = tracer.begin(CIMultiDict(tracestate="ignored"))
    parts = [
        Span(f"part {i}", SpanKind.CLIENT, trace, trace.child_id(), trace.span_id, 1, 2, {"i": i}) for i in range(count)
    ]
    tracer.end([Span("whole", SpanKind.SERVER, trace, trace.span_id, 0, 1, 3, {"said": "x"}, error="late"), *parts])
    return trace


@BOTH
async def test_the_last_spans_are_sent_at_the_end(
    monkeypatch: pytest.MonkeyPatch, collector: Collector, protocol: str
) -> None:
    use(monkeypatch, collector, protocol, BSP_SCHEDULE_DELAY=NEVER_MS, RESOURCE_ATTRIBUTES="team=red,service.version=9")
    async with tracing("a program", instance="one of two") as tracer:
        trace = told(tracer, 2)
        assert collector.spans(trace.trace_id_hex) == []
    got = {span.name: span for span in collector.spans(trace.trace_id_hex)}
    assert set(got) == {"whole", "part 0", "part 1"}
    whole, part = got["whole"], got["part 1"]
    assert (whole.span_id, whole.parent_id) == (f"{trace.span_id:016x}", "")
    assert (part.parent_id, part.attributes, part.is_error) == (whole.span_id, {"i": 1}, False)
    assert (whole.start_ns, whole.end_ns, whole.kind, part.kind) == (1, 3, 2, 3)
    assert (whole.is_error, whole.attributes) == (True, {"said": "x", "error.type": "late"})
    assert whole.resource | {"service.name": "a program", "service.instance.id": "one of two"} == whole.resource
    assert (whole.resource["team"], whole.resource["service.version"]) == ("red", "9")


@BOTH
@pytest.mark.parametrize("mode", ["hang", "refuse"])
async def test_a_collector_that_takes_nothing_costs_spans_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
    collector: Collector,
    caplog: pytest.LogCaptureFixture,
    protocol: str,
    mode: str,
) -> None:
    sizes = {"BSP_MAX_QUEUE_SIZE": "64", "BSP_MAX_EXPORT_BATCH_SIZE": "16"}
    use(monkeypatch, collector, protocol, EXPORTER_OTLP_TIMEOUT="1", **sizes)
    monkeypatch.setattr(running, "LAST_S", 0.2)
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    try:
        collector.mode(mode)
        tries = collector.tries()
        async with tracing("a program") as tracer:
            traces = [told(tracer, 9) for _ in range(200)]
            begun = collector.tries() - tries + 1  # batches taken from the queue, and one on its way
            await asyncio.to_thread(collector.wait, lambda: collector.tries() > tries)
        # A refused batch is dropped at once if its exporter is told to stop before it tries again.
        assert mode == "refuse" or "the last spans" in caplog.text
    finally:
        logging.getLogger("opentelemetry").setLevel(logging.NOTSET)
    collector.mode("take")
    await asyncio.to_thread(wait_for_threads)
    mine = {trace.trace_id_hex for trace in traces}
    kept = sum(span["trace_id"] in mine for span in collector.everything()["spans"])
    assert kept <= 64 + 16 * begun, "the queue is bounded"
    assert begun < 50, "otherwise the bound would be too large to test anything"


async def test_grpc_without_its_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    use(monkeypatch, collector, "grpc")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"warmroute\[otel-grpc\]"):
        async with tracing("a program"):
            pass


async def test_a_queue_smaller_than_a_batch_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    use(monkeypatch, collector, "http/protobuf", BSP_MAX_QUEUE_SIZE="10", BSP_MAX_EXPORT_BATCH_SIZE="16")
    with pytest.raises(ConfigError, match=r"OTEL_\*.*max_export_batch_size"):
        async with tracing("a program"):
            pass


def test_a_program_ends_with_status_2_if_a_variable_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    command = [sys.executable, "-m", "router", "--engines", "http://127.0.0.1:9", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr.strip()
        == "warmroute-gateway: OTEL_TRACES_EXPORTER: 'zipkin' is not known here; allowed: otlp, none"
    )


def ask(url: str, trace_id: str) -> None:
    body = {"model": "tiny", "prompt": "hello " * 100, "max_tokens": 3, "stream": True, "ignore_eos": True}
    sent = {"Content-Type": "application/json", "traceparent": f"00-{trace_id}-{'c' * 16}-01"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), sent)
    with urllib.request.urlopen(request, timeout=60.0) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")


@pytest.mark.timeout(300)
def test_gateway_and_engine_join_their_spans_and_live_on_when_the_collector_hangs(
    tmp_path: Path, collector: Collector
) -> None:
    make_checkpoint(tmp_path, hidden_size=64, layers=1, heads=4, kv_heads=2, intermediate_size=128, max_position=4096)
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.http, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    environ["OTEL_METRICS_EXPORTER"] = "otlp"
    flags = ["--model", str(tmp_path), "--served-model-name", "tiny", "--device", "sim", "--port", "0"]
    engine = Program("engine", *flags, environ=environ)
    with programs([engine]) as (url,):
        gateway = Program("router", "--engines", url, "--port", "0", environ=environ)
        with programs([gateway]) as (url,):
            first, later = "a" * 32, "b" * 32
            ask(url, first)
            collector.wait(lambda: len(collector.spans(first)) == 7)
            collector.mode("hang")
            for _ in range(3):
                ask(url, later)
            assert gateway.stop(deadline_s=STOPS_WITHIN_S) == 0, "otherwise the gateway was killed"
        collector.mode("take")
        assert engine.stop(deadline_s=STOPS_WITHIN_S) == 0
    spans = {(span.service.removeprefix("warmroute-"), span.name): span for span in collector.spans(first)}
    request, attempt = spans["gateway", "text_completion tiny"], spans["gateway", "attempt"]
    served = spans["engine", "text_completion tiny"]
    assert [request.parent_id, attempt.parent_id, served.parent_id] == ["c" * 16, request.span_id, attempt.span_id]
    parts = [spans["engine", name] for name in ("prepare", "queue", "prefill", "decode")]
    assert served.start_ns == parts[0].start_ns
    assert parts[-1].end_ns == served.end_ns
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        assert part.parent_id == served.span_id
        assert part.start_ns <= part.end_ns
        assert following is None or part.end_ns == following.start_ns
    said = served.attributes
    assert (said["gen_ai.usage.output_tokens"], said["gen_ai.response.finish_reasons"]) == (3, ["length"])
    assert said["gen_ai.usage.input_tokens"] > 0 == said["gen_ai.usage.cache_read.input_tokens"]
    assert said["warmroute.request_id"] == request.attributes["warmroute.request_id"]
    assert said["warmroute.pod"] == request.attributes["warmroute.pod"]
    assert "hello" not in repr(spans)
    counted = {metric["name"]: metric["points"] for metric in collector.metrics("warmroute-engine")}
    assert [point["value"] for point in counted["vllm:prompt_tokens"]] == [4 * said["gen_ai.usage.input_tokens"]]
    assert {span.name for span in collector.spans(later)} >= {"prepare", "queue", "prefill", "decode"}
