"""The span of a finished request, the same for gateway and engine."""

from __future__ import annotations

from collections.abc import Mapping

from engine.common.otel.operations import PROVIDER, operation_of
from engine.common.otel.tracer import Span, SpanKind, Trace, Value


def request_span(
    trace: Trace,
    path: str,
    model: str,
    *,
    end_ns: int,
    status: int,
    error: str,
    tokens: tuple[int | None, int | None, int | None],
    more: Mapping[str, Value | None],
) -> Span:
    """Return the span of a request to `path`. Attributes that are None are left out.

    `model`: empty if unknown. `end_ns`: nanoseconds since 1970. `tokens`: counts of the prompt's tokens, the answer's
    tokens, and the prompt's cached tokens. `more`: further attributes.
    """
    operation = operation_of(path)
    attributes: dict[str, Value | None] = {
        "http.request.method": "POST",
        "http.response.status_code": status,
        "url.path": path,
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model or None,
        "gen_ai.usage.input_tokens": tokens[0],
        "gen_ai.usage.output_tokens": tokens[1],
        "gen_ai.usage.cache_read.input_tokens": tokens[2],
        **more,
    }
    return Span(
        f"{operation} {model}" if model else operation,
        SpanKind.SERVER,
        trace,
        trace.span_id,
        trace.parent_id,
        trace.started_ns,
        end_ns,
        known(attributes),
        error,
    )


def known(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    """Return the attributes that have a value."""
    return {name: value for name, value in attributes.items() if value is not None}
