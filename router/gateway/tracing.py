"""A request's spans: one for the request, and one for each attempt at an engine under it.

Names of attributes: OpenTelemetry's conventions for generative AI (`gen_ai.*`) and HTTP where there is one, else
`warmroute.*`. No span carries a word of a prompt, of an answer or of an engine's error, nor a key.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from http import HTTPStatus

from aiohttp import web

from engine.contract.otel.operations import PROVIDER, operation_of
from engine.contract.otel.running import tracing
from engine.contract.otel.tracer import Kind, Span, Trace, Tracer, Value
from router.gateway.attempt import Attempt
from router.gateway.exchange import CLIENT_GONE, Exchange
from router.gateway.outcome import Outcome

PLACES = 6
"""Of seconds: microseconds."""
SERVICE = "warmroute-gateway"
"""The name that traces and metrics are sent under, unless the environment gives another."""
TRACER: web.AppKey[Tracer | None] = web.AppKey("tracer")


async def run_tracer(app: web.Application) -> AsyncIterator[None]:
    """A context of the application: what begins traces, where the environment asks for them. Raises ConfigError."""
    async with tracing(SERVICE) as app[TRACER]:
        yield


def spans_of(trace: Trace, exchange: Exchange, path: str, ended_s: float) -> list[Span]:
    """The spans of a request that has ended. `path`: of a known endpoint. `ended_s`: of the loop's clock."""

    def at_ns(loop_s: float) -> int:
        return trace.started_ns + round(1e9 * (loop_s - exchange.arrived_s))

    inbound, last, usage = exchange.inbound, exchange.last, exchange.usage
    status = exchange.status or HTTPStatus.INTERNAL_SERVER_ERROR
    operation, model = operation_of(path), inbound.model if inbound else ""
    attributes: dict[str, Value | None] = {
        "http.request.method": "POST",
        "http.response.status_code": int(status),
        "url.path": path,
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model or None,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "warmroute.request_id": exchange.request_id,
        "warmroute.tenant": exchange.tenant.name,
        "warmroute.attempts": len(exchange.attempts),
        "warmroute.breaks": exchange.breaks,
        "warmroute.queue_s": round(exchange.queued_s, PLACES),
    }
    if inbound is not None:
        attributes["gen_ai.request.stream"] = inbound.stream
        attributes["warmroute.prompt_tokens.estimated"] = inbound.prompt_tokens
    if last is not None:
        attributes |= _decision(last)
    if exchange.first_byte_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = round(exchange.first_byte_s - exchange.arrived_s, PLACES)
    name = f"{operation} {model}" if model else operation
    spans = [
        Span(
            name,
            Kind.SERVER,
            trace,
            trace.span_id,
            trace.parent_id,
            trace.started_ns,
            at_ns(ended_s),
            {key: value for key, value in attributes.items() if value is not None},
            _error(int(status), last),
        )
    ]
    spans += [
        Span(
            "attempt",
            Kind.CLIENT,
            trace,
            attempt.span_id,
            trace.span_id,
            at_ns(attempt.sent_s),
            at_ns(ended_s if attempt.ended_s is None else attempt.ended_s),
            _attempt(attempt),
            _failure(attempt),
        )
        for attempt in exchange.attempts
    ]
    return spans


def _decision(attempt: Attempt) -> dict[str, Value | None]:
    """Why it went there, and what came of that."""
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


def _attempt(attempt: Attempt) -> dict[str, Value]:
    outcome = "cancelled" if attempt.outcome is None else attempt.outcome.name.lower()
    known: dict[str, Value | None] = {**_decision(attempt), "warmroute.outcome": outcome}
    return {key: value for key, value in known.items() if value is not None}


def _failure(attempt: Attempt) -> str:
    """Why it failed, in a word; empty where its answer was passed on, or another attempt was faster."""
    if attempt.outcome in (None, Outcome.ANSWERED):
        return ""
    return attempt.reason or attempt.outcome.name.lower()


def _error(status: int, last: Attempt | None) -> str:
    """Why the request failed, in a word. A client's own mistakes (4xx) are no failures of who serves it."""
    if status == CLIENT_GONE:
        return "client_gone"
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return str(status)
    return _failure(last) if status == HTTPStatus.OK and last is not None else ""
