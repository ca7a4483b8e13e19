"""The generating endpoints: one request from its bytes to its record."""

from __future__ import annotations

import asyncio
from functools import partial

from aiohttp import web

from engine.contract import headers
from engine.contract.errors import ApiError
from engine.contract.log_lines import as_text, utc_now
from engine.contract.otel.tracer import Tracer
from engine.contract.requests import Endpoint
from router.fleet.lack import Lacks
from router.gateway.accounts import Accounts
from router.gateway.admission import Admission, Admitted
from router.gateway.body import BodyLimits, read_body
from router.gateway.by_load import passes
from router.gateway.chooser import Chooser
from router.gateway.conversations import Conversations
from router.gateway.door import leave_gate
from router.gateway.errors import Forbidden, Lacking, NoEngine, UpstreamError, error_response
from router.gateway.exchange import Exchange
from router.gateway.headers import request_id
from router.gateway.inbound import Inbound, Reader
from router.gateway.keys import key_id_of, tenant_of
from router.gateway.named_cache import NamesCache
from router.gateway.named_caches import NamedCaches
from router.gateway.names import NOT_ALLOWED
from router.gateway.observer import Observer
from router.gateway.proxy import Proxy
from router.gateway.sessions import Sessions
from router.gateway.tracing import spans_of
from router.routing.hindsight import regret_s
from router.routing.types import Rival
from router.telemetry.log import RequestLog, RequestRecord
from router.telemetry.metrics import Metrics
from router.tenants.limiter import Limiter, RateLimited

_KEYED = frozenset(str(endpoint) for endpoint in Endpoint)
MAX_ERROR_CHARS = 1024
"""Of an error in a request's log line: engines may say much."""


class Generate:
    """Handles every `Endpoint`, and the paths for which pods are chosen by load."""

    def __init__(
        self,
        admission: Admission,
        reader: Reader,
        chooser: Chooser,
        proxy: Proxy,
        metrics: Metrics,
        request_log: RequestLog,
        bodies: BodyLimits,
        lacks: Lacks,
        limiter: Limiter,
        accounts: Accounts | None,
        sessions: Sessions,
        conversations: Conversations,
        named_caches: NamedCaches,
        tracer: Tracer | None,
        *,
        total_timeout_s: float,
    ) -> None:
        self._admission = admission
        self._reader = reader
        self._chooser = chooser
        self._proxy = proxy
        self._metrics = metrics
        self._request_log = request_log
        self._bodies = bodies
        self._lacks = lacks
        self._limiter = limiter
        self._accounts = accounts
        self._sessions = sessions
        self._conversations = conversations
        self._named_caches = named_caches
        self._tracer = tracer
        self._total_timeout_s = total_timeout_s
        self._clock = asyncio.get_running_loop().time
        self.observer: Observer | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """The answer to a request."""
        now_s = self._clock()
        exchange = Exchange(request_id(request.headers), now_s, now_s + self._total_timeout_s, tenant_of(request))
        exchange.client_session = request.headers.get(headers.SESSION)
        if self._tracer is not None:
            exchange.trace = self._tracer.begin(request.headers)
        try:
            with self._admission.request() as admitted:
                body = await read_body(request, admitted, self._bodies, exchange.deadline_s)
                inbound = exchange.inbound = await self._read(request, exchange, admitted, body)
                response = await self._serve(request, exchange, inbound, admitted)
            exchange.status = exchange.status or response.status
            return response
        except ApiError as error:
            exchange.status = error.status
            exchange.error = error.detail if isinstance(error, UpstreamError) else error.message
            if isinstance(error, NoEngine):
                self._metrics.unserved(error.model)
            elif isinstance(error, Lacking):
                self._lacks.note(error.lack)
            elif isinstance(error, Forbidden) and error.code == NOT_ALLOWED:
                self._metrics.tenants.refused(exchange.tenant.name, "model")
            return error_response(error, exchange.request_id, rate_headers=exchange.rate_headers, path=request.path)
        except asyncio.CancelledError:
            exchange.client_left()
            raise
        finally:
            self._record(request, exchange)

    async def _read(self, request: web.Request, exchange: Exchange, admitted: Admitted, body: bytes) -> Inbound:
        """The request in `body`, put together and bound to a pod where an engine or a named cache has the beginning of
        it. Raises ApiError."""
        path, tenant = request.path, exchange.tenant
        if path not in _KEYED:
            return self._reader.read_by_load(request.rel_url.raw_path, body, request.headers, tenant)
        endpoint = Endpoint(path)
        try:
            inbound = self._reader.read(endpoint, body, request.headers, tenant)
        except NamesCache as named:
            body = await self._named_caches.expand(endpoint, named.fields, body, tenant, admitted)
            inbound = self._reader.read(endpoint, body, request.headers, tenant)
        return inbound if inbound.continues is None else await self._placed(request, exchange, inbound, body)

    async def pass_through(self, request: web.Request) -> web.StreamResponse:
        """The answer to a request whose path the gateway does not know. Raises HTTPNotFound for what never passes."""
        if not passes(request.rel_url.raw_path):
            raise web.HTTPNotFound
        return await self.handle(request)

    async def _placed(self, request: web.Request, exchange: Exchange, inbound: Inbound, body: bytes) -> Inbound:
        """The request, bound to the pod that has its conversation. A name stands for the model that was there before:
        what an engine keeps says nothing of the first user message. Raises ApiError."""
        leave_gate(request)
        place = await self._conversations.place(inbound, exchange.tenant.name)
        if place is None:
            return inbound
        if inbound.is_named and place.model != inbound.model:
            endpoint = Endpoint(request.path)
            inbound = self._reader.read(endpoint, body, request.headers, exchange.tenant, meant=place.model)
        return self._conversations.bound(inbound, place)

    async def _serve(
        self, request: web.Request, exchange: Exchange, inbound: Inbound, admitted: Admitted
    ) -> web.StreamResponse:
        """The answer, within the tenant's limits. Raises RateLimited, and what the proxy raises."""
        if exchange.tenant.limits is None:
            return await self._proxy.forward(request, exchange, inbound, admitted)
        try:
            tokens, on_wait = inbound.prompt_tokens + inbound.output_tokens, partial(leave_gate, request)
            async with self._limiter.take(exchange.tenant, tokens, on_wait) as taking:
                exchange.rate_headers = taking.headers()
                try:
                    return await self._proxy.forward(request, exchange, inbound, admitted)
                finally:
                    taking.used = exchange.tokens_used
        except RateLimited as error:
            exchange.rate_headers = error.headers
            self._metrics.tenants.refused(exchange.tenant.name, error.reason)
            raise

    def _look_back(self, rival: Rival, actual_s: float, inbound: Inbound, exchange: Exchange) -> None:
        """How the choice looks now that the answer is known."""
        tokens = exchange.usage.prompt_tokens
        self._metrics.looked_back(
            regret_s(rival, actual_s, estimated_tokens=inbound.prompt_tokens, prompt_tokens=tokens)
        )

    def _record(self, request: web.Request, exchange: Exchange) -> None:
        last, inbound, first_byte_s = exchange.last, exchange.inbound, exchange.first_byte_s
        if exchange.keeps:
            self._conversations.ended(exchange)
        choice = last.choice if last else None
        policy = choice.policy if choice else ""
        pod = choice.pod.pod_id if choice else ""
        self._metrics.answered(policy, pod, exchange.status or 500)
        if last and choice and inbound and first_byte_s is not None:
            self._metrics.first_byte(policy, first_byte_s - exchange.arrived_s)
            if exchange.status == 200 and not inbound.is_by_load:
                self._chooser.learn(inbound, choice, exchange.usage)
                self._sessions.ended(exchange)
                predicted_s = choice.decision.predicted_ttft_s
                if predicted_s is not None and inbound.stream and not exchange.breaks:
                    self._metrics.predicted(predicted_s, first_byte_s - last.sent_s)
                    if choice.decision.rival is not None and inbound.prompts == 1:
                        self._look_back(choice.decision.rival, first_byte_s - last.sent_s, inbound, exchange)
        if self._tracer is not None and exchange.trace is not None and exchange.trace.is_sampled:
            self._tracer.end(spans_of(exchange.trace, exchange, request.path, self._clock()))
        if self.observer is not None:
            self.observer.ended(exchange)
        if self._accounts is None and not self._request_log.enabled:
            return
        now_s = self._clock()
        if self._accounts is not None:
            self._accounts.ended(exchange, request.path, now_s - exchange.arrived_s)
        if not self._request_log.enabled:
            return
        self._request_log.write(
            RequestRecord(
                time=utc_now(),
                request_id=exchange.request_id,
                trace_id=None if exchange.trace is None else exchange.trace.trace_id_hex,
                tenant=exchange.tenant.name,
                key_id=key_id_of(request),
                client=request.remote or "",
                path=request.path,
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
