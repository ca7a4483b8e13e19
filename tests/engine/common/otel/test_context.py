"""What travels in `traceparent`, which requests are traced, and what the environment may ask for."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from multidict import CIMultiDict
from opentelemetry.sdk.trace import sampling as sdk
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine.common.otel import w3c
from engine.common.otel.environment import GRPC, HTTP, OtelSettings, from_environment
from engine.common.otel.sampling import NAMES, Sampling, sampling_of
from engine.common.otel.tracer import Span, SpanKind, Tracer
from engine.common.settings import ConfigError

IDS = st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def headers(*pairs: tuple[str, str]) -> CIMultiDict[str]:
    return CIMultiDict(pairs)


@given(*IDS, st.integers(0, 3), st.sampled_from(["", "a=1", "vendor@x=abc,b=2"]))
def test_what_is_sent_is_read_again(trace_id: int, span_id: int, flags: int, state: str) -> None:
    lines = w3c.fields(trace_id, span_id, flags, state).decode().split("\r\n")
    assert lines.pop() == ""
    sent = headers(*[(line.partition(": ")[0], line.partition(": ")[2]) for line in lines])
    assert w3c.read(sent) == (trace_id, span_id, flags, state)


@given(st.text(st.sampled_from("0123456789abcdefABCDEFg-\x00\x7f "), max_size=70))
@example(PARENT)
@example(PARENT.replace("00-", "01-", 1) + "-more")
@example(PARENT + "-more")
@example(PARENT.replace("00-", "ff-", 1))
@example("00-" + "0" * 32 + "-b7ad6b7169203331-01")
@example("00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01")
@example(PARENT.upper())
def test_a_header_is_accepted_if_the_sdk_accepts_it(text: str) -> None:
    mine = w3c.read(headers(("Traceparent", text)))
    context = TraceContextTextMapPropagator().extract({"traceparent": text})
    spans = [span.get_span_context() for span in context.values() if hasattr(span, "get_span_context")]
    if mine is None:
        return  # the SDK strips blanks, but here the HTTP parser has already done that
    assert [(span.trace_id, span.span_id) for span in spans] == [mine[:2]]


@pytest.mark.parametrize("text", [PARENT, PARENT.replace("00-", "cc-", 1) + "-more", PARENT[:-2] + "00"])
def test_valid_parents_are_read(text: str) -> None:
    parent = w3c.read(headers(("traceparent", text)))
    assert parent is not None
    assert (f"{parent.trace_id:032x}", f"{parent.span_id:016x}") == (text[3:35], text[36:52])
    assert parent.flags == int(text[53:55])


def test_two_parents_are_none_and_a_long_state_is_left_out() -> None:
    assert w3c.read(headers(("traceparent", PARENT), ("traceparent", PARENT))) is None
    for state in ("a=" + "b" * w3c.MAX_STATE_CHARS, "a=\u00e9", "a=\x01"):
        parent = w3c.read(headers(("traceparent", PARENT), ("tracestate", state)))
        assert parent is not None
        assert parent.state == ""


@given(st.sampled_from(NAMES), st.floats(0, 1), *IDS, st.sampled_from([None, 0, 1]))
def test_the_same_requests_are_traced_as_with_the_sdks_samplers(
    name: str, ratio: float, trace_id: int, span_id: int, flags: int | None
) -> None:
    known: dict[str, Any] = {
        "always_on": sdk.ALWAYS_ON,
        "always_off": sdk.ALWAYS_OFF,
        "traceidratio": sdk.TraceIdRatioBased(ratio),
    }
    root = known[name.removeprefix("parentbased_")]
    sampler = sdk.ParentBased(root) if name.startswith("parentbased_") else root
    context, parent = None, None
    if flags is not None:
        parent = w3c.Remote(trace_id, span_id, flags, "")
        told = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
        context = set_span_in_context(NonRecordingSpan(told))
    theirs = sampler.should_sample(context, trace_id, "a request").decision.is_sampled()
    assert sampling_of(name, repr(ratio)).takes(trace_id, parent) == theirs


def test_without_a_word_everything_is_traced_and_callers_decide_first() -> None:
    assert from_environment({}).sampling == Sampling(1.0, follows_parent=True)
    assert sampling_of("traceidratio", "") == Sampling(1.0, follows_parent=False)


ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}


@pytest.mark.parametrize(
    ("environ", "traces", "metrics"),
    [
        ({}, None, None),
        (ENDPOINT, HTTP, None),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, HTTP, None),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4318/v1/metrics"}, None, None),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, HTTP, None),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "otlp"}, None, HTTP),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "TRUE", "OTEL_METRICS_EXPORTER": "otlp"}, None, None),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_METRICS_EXPORTER": "otlp"}, GRPC, GRPC),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": HTTP}, HTTP, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, GRPC, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, None, None),
    ],
)
def test_what_the_environment_asks_for(environ: dict[str, str], traces: str | None, metrics: str | None) -> None:
    settings = from_environment(environ)
    assert (settings.traces, settings.metrics) == (traces, metrics)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin", "otlp, none"),
        ("OTEL_METRICS_EXPORTER", "prometheus", "otlp, none"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "http/protobuf, grpc"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector", "http:// or https://"),
        ("OTEL_TRACES_SAMPLER", "jaeger_remote", "parentbased_traceidratio"),
        ("OTEL_TRACES_SAMPLER_ARG", "1 %", "from 0 to 1"),
        ("OTEL_TRACES_SAMPLER_ARG", "nan", "from 0 to 1"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "10 s", "milliseconds"),
    ],
)
def test_an_error_names_the_variable_and_the_remedy(name: str, value: str, remedy: str) -> None:
    environ = {**ENDPOINT, "OTEL_TRACES_SAMPLER": "traceidratio", name: value}
    with pytest.raises(ConfigError, match=rf"{name}.*{re.escape(remedy)}"):
        from_environment(environ)


def test_the_environment_may_name_the_sender() -> None:
    assert from_environment({"OTEL_SERVICE_NAME": "front"}).service_name == "front"
    assert from_environment({"OTEL_RESOURCE_ATTRIBUTES": "a=b,service.name=my%20front"}).service_name == "my front"
    assert from_environment({}) == OtelSettings()


def test_a_sink_that_fails_costs_its_spans_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def fails(span: Span) -> None:
        raise RuntimeError("no room")

    tracer = Tracer(Sampling(), fails)
    trace = tracer.begin(headers())
    for _ in range(3):
        tracer.end([Span("a", SpanKind.SERVER, trace, trace.span_id, 0, 0, 1)])
    assert len([record for record in caplog.records if "could not be made" in record.message]) == 1


@pytest.mark.parametrize("program", ["router", "engine"])
def test_without_the_variables_no_program_imports_the_sdk(program: str) -> None:
    code = f"""
import atexit, sys
atexit.register(lambda: print("imported:", [name for name in sys.modules if name.startswith("opentelemetry.sdk.")]))
sys.argv = ["{program}", "--help"]
from {program}.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.splitlines()[-1] == "imported: []"
