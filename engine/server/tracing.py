"""A request's spans in the engine: the request, and under it what it waited for and what was computed, in turn.

Names of attributes as in the gateway: `gen_ai.*` and HTTP where the conventions have one, else `warmroute.*`. No span
carries a word of a prompt or of an answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

from engine.contract import headers
from engine.contract.errors import ApiError
from engine.contract.otel.operations import PROVIDER, operation_of
from engine.contract.otel.tracer import Kind, Span, Trace, Tracer, Value

CLIENT_GONE = "client_gone"
MAX_REQUEST_ID_CHARS = 128


@dataclass(slots=True)
class Timeline:
    """When a request came to what, in seconds of `time.perf_counter`; None: it did not."""

    arrived_s: float
    prepared_s: float | None = None
    """Its prompts are tokens, and it is in the scheduler's queue."""
    taken_up_s: float | None = None
    """A step computes of it."""
    first_token_s: float | None = None
    pod: str = ""
    model: str = ""
    stream: bool = False
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish_reasons: list[str] = field(default_factory=list)
    error: str = ""
    """Why it failed, in a word."""
    status: int = 200


@contextmanager
def traced(tracer: Tracer | None, request: web.Request, arrived_s: float) -> Iterator[Timeline]:
    """What the block fills in becomes the request's spans when it ends, if anybody asks for them."""
    seen = Timeline(arrived_s)
    trace = None if tracer is None else tracer.begin(request.headers)
    if tracer is None or trace is None or not trace.is_sampled:
        yield seen
        return
    try:
        yield seen
    except ApiError as error:
        seen.status = error.status
        if error.status >= ApiError.status:
            seen.error = str(error.status)
        raise
    except Exception as error:
        seen.status, seen.error = ApiError.status, CLIENT_GONE if isinstance(error, ConnectionError) else "internal"
        raise
    except BaseException:  # cancelled: the client has left
        seen.error = CLIENT_GONE
        raise
    finally:
        tracer.end(spans_of(trace, seen, request, time.perf_counter()))


def spans_of(trace: Trace, seen: Timeline, request: web.Request, ended_s: float) -> list[Span]:
    """The spans of a request that has ended at `ended_s`."""

    def at_ns(seconds: float) -> int:
        return trace.started_ns + round(1e9 * (seconds - seen.arrived_s))

    def part(name: str, began_s: float, next_s: float | None, **attributes: Value) -> Span:
        end_s = ended_s if next_s is None else next_s
        return Span(
            name, Kind.INTERNAL, trace, trace.child_id(), trace.span_id, at_ns(began_s), at_ns(end_s), attributes
        )

    operation = operation_of(request.path)
    own: dict[str, Value | None] = {
        "http.request.method": "POST",
        "http.response.status_code": seen.status,
        "url.path": request.path,
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": seen.model or None,
        "gen_ai.request.stream": seen.stream,
        "gen_ai.usage.input_tokens": seen.prompt_tokens,
        "gen_ai.usage.output_tokens": seen.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": seen.cached_tokens,
        "gen_ai.response.finish_reasons": seen.finish_reasons or None,
        "warmroute.pod": seen.pod or None,
        "warmroute.request_id": request.headers.get(headers.REQUEST_ID, "")[:MAX_REQUEST_ID_CHARS] or None,
    }
    if seen.first_token_s is not None:
        own["gen_ai.response.time_to_first_chunk"] = seen.first_token_s - seen.arrived_s
    attributes = {key: value for key, value in own.items() if value is not None}
    name = f"{operation} {seen.model}" if seen.model else operation
    ends = at_ns(ended_s)
    spans = [
        Span(
            name,
            Kind.SERVER,
            trace,
            trace.span_id,
            trace.parent_id,
            trace.started_ns,
            ends,
            attributes,
            seen.error,
        ),
        part("prepare", seen.arrived_s, seen.prepared_s),
    ]
    if seen.prepared_s is not None:
        spans.append(part("queue", seen.prepared_s, seen.taken_up_s))
    if seen.taken_up_s is not None:
        cached = {} if seen.cached_tokens is None else {"warmroute.cached_tokens": seen.cached_tokens}
        spans.append(part("prefill", seen.taken_up_s, seen.first_token_s, **cached))
    if seen.first_token_s is not None:
        output = {} if seen.output_tokens is None else {"gen_ai.usage.output_tokens": seen.output_tokens}
        spans.append(part("decode", seen.first_token_s, None, **output))
    return spans
