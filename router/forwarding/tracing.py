"""A request's spans: one for the request, with one below it for each attempt at an engine.

Attributes have the names of OpenTelemetry's conventions for generative AI (`gen_ai.*`) and HTTP if these have one, else
`warmroute.*`. No span contains text of a prompt, an answer or an engine's error, or a key.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import assert_never

from aiohttp import web

from engine.common.otel.request_span import known, request_span
from engine.common.otel.running import tracing
from engine.common.otel.tracer import Span, SpanKind, Trace, Tracer, Value
from router.engines.attempt_result import Broken, Done, GoesOn, Refused, Retry
from router.forwarding.exchange import CLIENT_GONE, Attempt, Exchange

PLACES = 6
"""Decimal places of times in seconds: microseconds."""
SERVICE = "warmroute-gateway"
"""The service name of traces and metrics, unless the environment gives another."""
TRACER: web.AppKey[Tracer | None] = web.AppKey("tracer")


async def run_tracer(app: web.Application) -> AsyncIterator[None]:
    """Run the tracer for the application's life, if the environment asks for traces. Raises ConfigError."""
    async with tracing(SERVICE) as app[TRACER]:
        yield


def spans_of(trace: Trace, exchange: Exchange, path: str, ended_s: float) -> list[Span]:
    """Return the spans of a request that has ended. `path`: of a known endpoint. `ended_s`: on the loop's clock."""

    arrival = exchange.arrival

    def at_ns(loop_s: float) -> int:
        return trace.started_ns + round(1e9 * (loop_s - arrival.arrived_s))

    inbound, last, usage = exchange.inbound, exchange.last, exchange.usage
    status = exchange.status or HTTPStatus.INTERNAL_SERVER_ERROR
    more: dict[str, Value | None] = {
        "http.request.method": inbound.resource[0] if inbound is not None and inbound.resource else "POST",
        "warmroute.request_id": arrival.request_id,
        "warmroute.tenant": arrival.tenant.name,
        "warmroute.attempts": len(exchange.attempts),
        "warmroute.breaks": exchange.breaks,
        "warmroute.queue_s": round(exchange.queued_s, PLACES),
    }
    if inbound is not None:
        more["gen_ai.request.stream"] = inbound.stream
        more["warmroute.prompt_tokens.estimated"] = inbound.prompt_tokens
    if last is not None:
        more |= _decision(last)
    if exchange.first_byte_s is not None:
        more["gen_ai.response.time_to_first_chunk"] = round(exchange.first_byte_s - arrival.arrived_s, PLACES)
    spans = [
        request_span(
            trace,
            path,
            inbound.model if inbound else "",
            end_ns=at_ns(ended_s),
            status=int(status),
            error=_error(int(status), exchange),
            tokens=(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
            more=more,
        )
    ]
    spans += [
        Span(
            "attempt",
            SpanKind.CLIENT,
            trace,
            attempt.span_id,
            trace.span_id,
            at_ns(attempt.sent_s),
            at_ns(ended_s if attempt.ended_s is None else attempt.ended_s),
            _attempt(attempt, exchange),
            _failure(attempt, exchange),
        )
        for attempt in exchange.attempts
    ]
    return spans


def _decision(attempt: Attempt) -> dict[str, Value | None]:
    """Return the attributes that tell why the attempt went to its pod, and how the prediction turned out."""
    choice = attempt.choice
    actual_s = None if attempt.first_byte_s is None else round(attempt.first_byte_s - attempt.sent_s, PLACES)
    return {
        "warmroute.policy": choice.policy,
        "warmroute.pod": choice.pod.pod_id,
        "warmroute.cached_tokens.predicted": choice.cached_tokens,
        "warmroute.ttft.predicted_s": choice.decision.predicted_ttft_s,
        "warmroute.ttft.actual_s": actual_s,
        "warmroute.ttft.next_best_s": None if choice.decision.rival is None else choice.decision.rival.ttft_s,
    }


def _attempt(attempt: Attempt, exchange: Exchange) -> dict[str, Value]:
    return known({**_decision(attempt), "warmroute.outcome": _outcome(attempt, exchange)})


def _outcome(attempt: Attempt, exchange: Exchange) -> str:
    """Return the attempt's result as users know it."""
    if exchange.status == CLIENT_GONE and attempt is exchange.last:
        return "client_gone"
    match attempt.result:
        case None:
            return "cancelled"
        case GoesOn() | Done():
            return "answered"
        case Refused():
            return "refused"
        case Retry(cause) | Broken(cause):
            return cause.name.lower()
        case _:
            assert_never(attempt.result)


def _failure(attempt: Attempt, exchange: Exchange) -> str:
    """Return the attempt's error type; empty if its answer was passed on or another attempt was faster."""
    outcome = _outcome(attempt, exchange)
    if outcome in ("cancelled", "answered"):
        return ""
    return attempt.result.reason if isinstance(attempt.result, Retry) else outcome


def _error(status: int, exchange: Exchange) -> str:
    """Return the request's error type. A client's own mistakes (4xx) are not failures of the server."""
    if status == CLIENT_GONE:
        return "client_gone"
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return str(status)
    last = exchange.last
    return _failure(last, exchange) if status == HTTPStatus.OK and last is not None else ""
