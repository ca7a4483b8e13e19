"""Report the end of a request to metrics, the chooser, traces, tenants' accounts and the log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.common.log_lines import as_text, utc_now
from engine.common.otel.tracer import Tracer
from engine.contract.errors import ApiError
from router.choosing.chooser import Chooser
from router.edge.errors import Forbidden, NoEngine, OutOfResources, UpstreamError
from router.fleet.lack import Lacks
from router.forwarding.accounts import Accounts
from router.forwarding.conversations import Conversations
from router.forwarding.exchange import Exchange
from router.forwarding.observer import Observer
from router.forwarding.sessions import Sessions
from router.forwarding.tracing import spans_of
from router.reading.inbound import Inbound
from router.reading.names import NOT_ALLOWED
from router.routing.hindsight import regret_s
from router.telemetry.log import RequestLog, RequestRecord
from router.telemetry.metrics import Metrics
from router.views.types import Rival

MAX_ERROR_CHARS = 1024
"""Longest error text in a request's log line: engines may send long ones."""


class Recorder:
    """Records every request that ends. `observer`, if there is one, gets each of them too."""

    def __init__(
        self,
        chooser: Chooser,
        metrics: Metrics,
        request_log: RequestLog,
        lacks: Lacks,
        accounts: Accounts | None,
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
        exchange.status = error.status
        exchange.error = error.detail if isinstance(error, UpstreamError) else error.message
        if isinstance(error, NoEngine):
            self._metrics.answers.unserved(error.model)
        elif isinstance(error, OutOfResources):
            self._lacks.note(error.lack)
        elif isinstance(error, Forbidden) and error.code == NOT_ALLOWED:
            self._metrics.tenants.refused(exchange.tenant.name, "model")

    def ended(self, exchange: Exchange, path: str, who: Callable[[], tuple[str | None, str]]) -> None:
        """Record that the request for `path` has ended, whatever its outcome.

        `who` returns the key's id and the client's address; it is called only if they are logged.
        """
        last, inbound, first_byte_s = exchange.last, exchange.inbound, exchange.first_byte_s
        if exchange.keeps:
            self._conversations.ended(exchange)
        choice = last.choice if last else None
        policy = choice.policy if choice else ""
        pod = choice.pod.pod_id if choice else ""
        self._metrics.answers.answered(policy, pod, exchange.status or 500)
        if last and choice and inbound and first_byte_s is not None:
            self._metrics.answers.first_byte(policy, first_byte_s - exchange.arrived_s)
            if exchange.status == 200 and not inbound.is_by_load:
                self._chooser.learn(inbound, choice, exchange.usage)
                self._sessions.ended(exchange)
                predicted_s = choice.decision.predicted_ttft_s
                if predicted_s is not None and inbound.stream and not exchange.breaks:
                    self._metrics.decisions.predicted(predicted_s, first_byte_s - last.sent_s)
                    if choice.decision.rival is not None and inbound.prompts == 1:
                        self._look_back(choice.decision.rival, first_byte_s - last.sent_s, inbound, exchange)
        if self._tracer is not None and exchange.trace is not None and exchange.trace.is_sampled:
            self._tracer.end(spans_of(exchange.trace, exchange, path, self._clock()))
        if self.observer is not None:
            self.observer.ended(exchange)
        if self._accounts is None and not self._request_log.enabled:
            return
        now_s = self._clock()
        if self._accounts is not None:
            self._accounts.ended(exchange, path, now_s - exchange.arrived_s)
        if not self._request_log.enabled:
            return
        key_id, client = who()
        self._request_log.write(
            RequestRecord(
                time=utc_now(),
                request_id=exchange.request_id,
                trace_id=None if exchange.trace is None else exchange.trace.trace_id_hex,
                tenant=exchange.tenant.name,
                key_id=key_id,
                client=client,
                path=path,
                model=inbound.model if inbound else "",
                policy=policy,
                pod=pod,
                status=exchange.status or 500,
                attempts=len(exchange.attempts),
                breaks=exchange.breaks,
                prompt_tokens_estimated=inbound.prompt_tokens if inbound else 0,
                cached_tokens_predicted=choice.cached_tokens if choice else 0,
                cached_tokens=exchange.usage.cached_tokens,
                prompt_tokens=exchange.usage.prompt_tokens,
                completion_tokens=exchange.usage.completion_tokens,
                queue_ms=round(1000 * exchange.queued_s, 2),
                first_byte_ms=None if first_byte_s is None else round(1000 * (first_byte_s - exchange.arrived_s), 2),
                total_ms=round(1000 * (now_s - exchange.arrived_s), 2),
                error=exchange.error and as_text(exchange.error, MAX_ERROR_CHARS),
            )
        )

    def _look_back(self, rival: Rival, actual_s: float, inbound: Inbound, exchange: Exchange) -> None:
        """Compare the choice with its rival, the best pod not chosen, now that the actual time is known."""
        tokens = exchange.usage.prompt_tokens
        self._metrics.decisions.looked_back(
            regret_s(rival, actual_s, estimated_tokens=inbound.prompt_tokens, prompt_tokens=tokens)
        )
