"""Report the end of a request to metrics, the chooser, traces, tenants' accounts and the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Literal, Protocol

from engine.common.log_lines import as_text, utc_now
from engine.common.otel.tracer import Tracer
from engine.contract.errors import ApiError
from router.choosing.chooser import Chooser
from router.choosing.score_observer import ScoreObserver
from router.edge.errors import Forbidden, NoEngine, OutOfResources
from router.fleet.lack import Lacks
from router.forwarding.attempts import Sessions
from router.forwarding.conversations import Conversations
from router.forwarding.exchange import Attempt, Exchange
from router.forwarding.tracing import spans_of
from router.reading.engine_fields import FieldRefused
from router.reading.inbound import Inbound
from router.reading.names import NOT_ALLOWED
from router.routing.regret import regret_s
from router.telemetry.log import RequestLog, RequestRecord
from router.telemetry.metrics import Metrics
from router.telemetry.tenants import TenantMetrics
from router.tenants.limiter import RateLimited
from router.tenants.usage_log import UsageLog
from router.views.types import Rival

log = logging.getLogger(__name__)

MAX_ERROR_CHARS = 1024
"""Longest error text in a request's log line: engines may send long ones."""


class Observer(ScoreObserver, Protocol):
    """Sees decisions and ended requests, but decides nothing.

    It is called in the path of every request, so it must not wait, and must cost almost nothing while nobody watches.
    """

    def ended(self, exchange: Exchange) -> None:
        """Record a request that has ended, whatever its outcome."""
        ...


class TenantAccounts:
    """Counts every request that ends for its tenant, in the metrics and in the usage log."""

    def __init__(self, metrics: TenantMetrics, usage_log: UsageLog | None) -> None:
        self._metrics = metrics
        self._usage_log = usage_log

    def ended(self, exchange: Exchange, endpoint: str, total_s: float) -> None:
        """Count a request. `total_s`: seconds from the request's arrival to its end."""
        name, inbound, usage = exchange.arrival.tenant.name, exchange.inbound, exchange.usage
        self._metrics.answered(name, exchange.status or 500)
        if inbound is None or not exchange.has_run:
            return
        prompt = inbound.prompt_tokens if usage.prompt_tokens is None else usage.prompt_tokens
        output = inbound.answer_tokens if usage.completion_tokens is None else usage.completion_tokens
        cached = usage.cached_tokens or 0
        self._metrics.used(name, prompt=prompt, cached=cached, output=output)
        if self._usage_log is None:
            return
        self._usage_log.add(
            {
                "request_id": exchange.arrival.request_id,
                "tenant": name,
                "endpoint": endpoint,
                "model": inbound.model,
                "status": exchange.status or 500,
                "prompt_tokens": prompt,
                "cached_tokens": cached,
                "completion_tokens": output,
                "estimated": [
                    field
                    for field, count in (
                        ("prompt_tokens", usage.prompt_tokens),
                        ("cached_tokens", usage.cached_tokens),
                        ("completion_tokens", usage.completion_tokens),
                    )
                    if count is None
                ],
                "seconds": round(total_s, 3),
            }
        )


class Recorder:
    """Records every request that ends. `observer`, if there is one, gets each of them too."""

    def __init__(
        self,
        chooser: Chooser,
        metrics: Metrics,
        request_log: RequestLog,
        lacks: Lacks,
        accounts: TenantAccounts | None,
        sessions: Sessions,
        conversations: Conversations,
        tracer: Tracer | None,
    ) -> None:
        self._chooser = chooser
        self._metrics = metrics
        self._request_log = request_log
        self._lacks = lacks
        self._accounts = accounts
        self._sessions = sessions
        self._conversations = conversations
        self._tracer = tracer
        self._clock = asyncio.get_running_loop().time
        self.observer: Observer | None = None

    def refused(self, exchange: Exchange, error: ApiError) -> None:
        """Record that the client gets `error` instead of an answer."""
        exchange.refused(error)
        if isinstance(error, NoEngine):
            self._metrics.answers.unserved(error.model)
        elif isinstance(error, RateLimited):
            exchange.limited(error.headers)
            self._metrics.tenants.refused(exchange.arrival.tenant.name, error.reason)
        elif isinstance(error, FieldRefused):
            self._kept_back(exchange, error.field, "refused")
        elif isinstance(error, OutOfResources):
            self._lacks.note(error.lack)
        elif isinstance(error, Forbidden) and error.code == NOT_ALLOWED:
            self._metrics.tenants.refused(exchange.arrival.tenant.name, "model")

    def ended(self, exchange: Exchange, path: str, who: Callable[[], tuple[str | None, str]]) -> None:
        """Record that the request for `path` has ended, whatever its outcome.

        `who` returns the key's id and the client's address; it is called only if they are logged.
        """
        last = exchange.last
        if exchange.keeps:
            self._conversations.ended(exchange)
        if exchange.inbound is not None:
            for field in exchange.inbound.dropped:
                self._kept_back(exchange, field, "dropped")
        policy, pod = ("", "") if last is None else (last.choice.policy, last.pod.pod_id)
        self._metrics.answers.answered(policy, pod, exchange.status or 500)
        if last is not None and exchange.inbound is not None and exchange.first_byte_s is not None:
            self._learn(exchange, exchange.inbound, last, exchange.first_byte_s)
        trace, now_s = exchange.arrival.trace, self._clock()
        if self._tracer is not None and trace is not None and trace.is_sampled:
            self._tracer.end(spans_of(trace, exchange, path, now_s))
        if self.observer is not None:
            self.observer.ended(exchange)
        if self._accounts is not None:
            self._accounts.ended(exchange, path, now_s - exchange.arrival.arrived_s)
        if self._request_log.enabled:
            self._request_log.write(_logged(exchange, path, now_s, *who()))

    def _kept_back(self, exchange: Exchange, field: str, outcome: Literal["dropped", "refused"]) -> None:
        """Count a field that engines must not get, and log the first one of each name."""
        if self._metrics.answers.field_kept_back(field, outcome):
            log.warning(
                "request %s of tenant %s has the field %s, which engines must not get from clients: it is %s; this is "
                "logged once, and warmroute_gateway_fields_kept_back_total counts further ones",
                exchange.arrival.request_id,
                exchange.arrival.tenant.name,
                field,
                outcome,
            )

    def _learn(self, exchange: Exchange, inbound: Inbound, last: Attempt, first_byte_s: float) -> None:
        """Learn from a request whose answer has begun."""
        choice = last.choice
        self._metrics.answers.first_byte(choice.policy, first_byte_s - exchange.arrival.arrived_s)
        if exchange.status != 200 or inbound.is_by_load:
            return
        self._chooser.learn(inbound, choice, exchange.usage)
        self._sessions.ended(exchange)
        predicted_s = choice.decision.predicted_ttft_s
        if predicted_s is not None and inbound.stream and not exchange.breaks:
            self._metrics.decisions.predicted(predicted_s, first_byte_s - last.sent_s)
            if choice.decision.rival is not None and inbound.prompts == 1:
                self._look_back(choice.decision.rival, first_byte_s - last.sent_s, inbound, exchange)

    def _look_back(self, rival: Rival, actual_s: float, inbound: Inbound, exchange: Exchange) -> None:
        """Compare the choice with its rival, the best pod not chosen, now that the actual time is known."""
        tokens = exchange.usage.prompt_tokens
        self._metrics.decisions.looked_back(
            regret_s(rival, actual_s, estimated_tokens=inbound.prompt_tokens, prompt_tokens=tokens)
        )


def _logged(exchange: Exchange, path: str, now_s: float, key_id: str | None, client: str) -> RequestRecord:
    """Return the line of the request log."""
    arrival, inbound, usage = exchange.arrival, exchange.inbound, exchange.usage
    choice = None if exchange.last is None else exchange.last.choice
    first_byte_s = exchange.first_byte_s
    return RequestRecord(
        time=utc_now(),
        request_id=arrival.request_id,
        trace_id=None if arrival.trace is None else arrival.trace.trace_id_hex,
        tenant=arrival.tenant.name,
        key_id=key_id,
        client=client,
        path=path,
        model=inbound.model if inbound else "",
        policy=choice.policy if choice else "",
        pod=choice.pod.pod_id if choice else "",
        status=exchange.status or 500,
        attempts=len(exchange.attempts),
        breaks=exchange.breaks,
        prompt_tokens_estimated=inbound.prompt_tokens if inbound else 0,
        cached_tokens_predicted=choice.cached_tokens if choice else 0,
        cached_tokens=usage.cached_tokens,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        queue_ms=round(1000 * exchange.queued_s, 2),
        first_byte_ms=None if first_byte_s is None else round(1000 * (first_byte_s - arrival.arrived_s), 2),
        total_ms=round(1000 * (now_s - arrival.arrived_s), 2),
        error=exchange.error and as_text(exchange.error, MAX_ERROR_CHARS),
    )
