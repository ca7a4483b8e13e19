"""A request's spans in the engine: the request, and its children for preparing, waiting, prefill and decode, in order.

Attributes have the same names as in the gateway: `gen_ai.*` and HTTP names if the conventions have one, else
`warmroute.*`. No span contains text of a prompt or of an answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

from engine.common.otel.request_span import request_span
from engine.common.otel.tracer import Span, SpanKind, Trace, Tracer, Value
from engine.contract import headers
from engine.contract.errors import ApiError

CLIENT_GONE = "client_gone"
MAX_REQUEST_ID_CHARS = 128


@dataclass(slots=True)
class Timeline:
    """When a request reached each stage, in seconds of `time.perf_counter`; None: it has not reached the stage."""

    arrived_s: float
    prepared_s: float | None = None
    """When its prompts were tokenized and it was about to be queued."""
    taken_up_s: float | None = None
    """When a step first included it."""
    first_token_s: float | None = None
    pod: str = ""
    model: str = ""
    stream: bool = False
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish_reasons: list[str] = field(default_factory=list)
    error: str = ""
    """Why it failed, as a short name."""
    status: int = 200


@contextmanager
def traced(tracer: Tracer | None, request: web.Request, arrived_s: float) -> Iterator[Timeline]:
    """Yield a timeline for the block to fill in. At the end it becomes the request's spans, if the trace is sampled."""
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
    """Return the spans of a request that has ended at `ended_s`."""

    def at_ns(seconds: float) -> int:
        return trace.started_ns + round(1e9 * (seconds - seen.arrived_s))

    def part(name: str, began_s: float, next_s: float | None, **attributes: Value) -> Span:
        end_s = ended_s if next_s is None else next_s
        return Span(
            name, SpanKind.INTERNAL, trace, trace.child_id(), trace.span_id, at_ns(began_s), at_ns(end_s), attributes
        )

    more: dict[str, Value | None] = {
        "gen_ai.request.stream": seen.stream,
        "gen_ai.response.finish_reasons": seen.finish_reasons or None,
        "warmroute.pod": seen.pod or None,
        "warmroute.request_id": request.headers.get(headers.REQUEST_ID, "")[:MAX_REQUEST_ID_CHARS] or None,
    }
    if seen.first_token_s is not None:
        more["gen_ai.response.time_to_first_chunk"] = seen.first_token_s - seen.arrived_s
    spans = [
        request_span(
            trace,
            request.path,
            seen.model,
            end_ns=at_ns(ended_s),
            status=seen.status,
            error=seen.error,
            tokens=(seen.prompt_tokens, seen.output_tokens, seen.cached_tokens),
            more=more,
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
