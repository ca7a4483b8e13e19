"""Gives finished spans to OpenTelemetry's SDK, which sends them in batches from its own thread.

It is imported only if traces are turned on, because the import takes 0.3 s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace.status import Status, StatusCode

from engine.common.otel.environment import GRPC
from engine.common.otel.tracer import Span, SpanKind, Trace
from engine.common.settings import ConfigError
from engine.common.version import program_version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_KINDS = {
    SpanKind.SERVER: api.SpanKind.SERVER,
    SpanKind.CLIENT: api.SpanKind.CLIENT,
    SpanKind.INTERNAL: api.SpanKind.INTERNAL,
}


class SpanExport:
    """A sink for `Tracer`. Its queue is bounded (`OTEL_BSP_MAX_QUEUE_SIZE`) and drops spans when it is full."""

    def __init__(self, protocol: str, resource: Resource) -> None:
        """Does not connect yet. Raises ConfigError if a variable that the SDK reads has a bad value, or if a package is
        missing."""
        self._ids = _GivenIds()
        # The sampling decision was made when the request arrived, so every span here is sent.
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        try:
            self._provider.add_span_processor(BatchSpanProcessor(_exporter(protocol)))
        except (ValueError, OSError) as error:
            raise ConfigError(f"traces cannot be sent as the OTEL_* variables ask: {error}") from None
        self._tracer = self._provider.get_tracer("warmroute", program_version())

    def __call__(self, span: Span) -> None:
        """Queue the span."""
        self._ids.span_id, self._ids.trace_id = span.span_id, span.trace.trace_id
        begun = self._tracer.start_span(
            span.name,
            context=_context(span.trace, span.parent_id, is_remote=span.parent_id == span.trace.parent_id),
            kind=_KINDS[span.kind],
            attributes=span.attributes,
            start_time=span.start_ns,
        )
        if span.error:
            begun.set_attribute("error.type", span.error)
            begun.set_status(Status(StatusCode.ERROR))
        begun.end(max(span.start_ns, span.end_ns))

    def close(self) -> None:
        """Send the queued spans, and end the thread. Blocks as long as the collector takes."""
        self._provider.shutdown()


class _GivenIds(IdGenerator):
    """Returns the ids that were sent to the next hop before the span was made."""

    def __init__(self) -> None:
        self.span_id = self.trace_id = 1

    def generate_span_id(self) -> int:
        return self.span_id

    def generate_trace_id(self) -> int:
        return self.trace_id


def _context(trace: Trace, parent_id: int, *, is_remote: bool) -> Context:
    if not parent_id:
        return Context()
    parent = api.SpanContext(
        trace.trace_id,
        parent_id,
        is_remote=is_remote,
        trace_flags=api.TraceFlags(trace.flags),
        trace_state=api.TraceState.from_header([trace.state] if trace.state else []),
    )
    return api.set_span_in_context(api.NonRecordingSpan(parent), Context())


def _exporter(protocol: str) -> SpanExporter:
    if protocol == GRPC:
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc
        except ImportError:
            raise needs_grpc("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") from None
        return OverGrpc()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

    return OverHttp()


def needs_grpc(variable: str) -> ConfigError:
    """Return the error for a missing gRPC package."""
    return ConfigError(
        f"{variable}, or OTEL_EXPORTER_OTLP_PROTOCOL, is grpc, which needs a package that is not installed: "
        "pip install 'warmroute[otel-grpc]', or use http/protobuf"
    )


def resource_of(service: str, instance: str) -> Resource:
    """Return the sender's attributes: `service`, `instance` and `OTEL_RESOURCE_ATTRIBUTES`. The variable overrides all
    except the service's name."""
    said = OTELResourceDetector().detect().attributes
    own = {"service.instance.id": instance, "service.version": program_version()}
    own = {key: value for key, value in own.items() if value and key not in said}
    return Resource.create({**own, "service.name": service})
