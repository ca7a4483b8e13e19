"""The generating endpoints: handle one request from its bytes to its record."""

from __future__ import annotations

import asyncio
from functools import partial

from aiohttp import web

from engine.common.otel.tracer import Tracer
from engine.contract import headers
from engine.contract.errors import ApiError
from router.edge.admission import Admission, Admitted
from router.edge.body import BodyLimits, read_body
from router.edge.client_keys import client_of, tenant_of
from router.edge.connection_limits import leaving_gate
from router.edge.errors import error_response
from router.edge.headers import request_id
from router.endpoints.intake import Reading
from router.endpoints.uploads import Uploads
from router.forwarding.exchange import Exchange
from router.forwarding.proxy import Proxy
from router.forwarding.recorder import Recorder
from router.reading.by_load import UPLOADS, passes
from router.reading.inbound import Inbound
from router.telemetry.metrics import Metrics
from router.tenants.limiter import Limiter, RateLimited


class Generate:
    """Handles every `Endpoint`, and the paths whose pods are chosen by load."""

    def __init__(
        self,
        admission: Admission,
        reading: Reading,
        uploads: Uploads,
        proxy: Proxy,
        metrics: Metrics,
        bodies: BodyLimits,
        limiter: Limiter,
        recorder: Recorder,
        tracer: Tracer | None,
        *,
        total_timeout_s: float,
    ) -> None:
        self._admission = admission
        self._reading = reading
        self._uploads = uploads
        self._proxy = proxy
        self._metrics = metrics
        self._bodies = bodies
        self._limiter = limiter
        self._recorder = recorder
        self._tracer = tracer
        self._total_timeout_s = total_timeout_s
        self._clock = asyncio.get_running_loop().time

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request."""
        now_s = self._clock()
        exchange = Exchange(request_id(request.headers), now_s, now_s + self._total_timeout_s, tenant_of(request))
        exchange.client_session = request.headers.get(headers.SESSION)
        if self._tracer is not None:
            exchange.trace = self._tracer.begin(request.headers)
        try:
            with self._admission.request() as admitted:
                inbound = exchange.inbound = await self._read(request, exchange, admitted)
                response = await self._serve(request, exchange, inbound, admitted)
            exchange.status = exchange.status or response.status
            return response
        except ApiError as error:
            self._recorder.refused(exchange, error)
            return error_response(error, exchange.request_id, rate_headers=exchange.rate_headers, path=request.path)
        except asyncio.CancelledError:
            exchange.client_left()
            raise
        finally:
            if exchange.upload is not None:
                exchange.upload.close()
            self._recorder.ended(exchange, request.path, partial(client_of, request))

    async def pass_through(self, request: web.Request) -> web.StreamResponse:
        """Answer a request whose path the gateway does not know. Raises HTTPNotFound for paths that never pass."""
        if not passes(request.rel_url.raw_path):
            raise web.HTTPNotFound
        return await self.handle(request)

    async def _read(self, request: web.Request, exchange: Exchange, admitted: Admitted) -> Inbound:
        if request.path in UPLOADS:
            return await self._uploads.read(request, exchange, admitted)
        body = await read_body(request, admitted, self._bodies, exchange.deadline_s)
        return await self._reading.read(
            *(request.path, request.rel_url.raw_path, request.headers, body),
            *(exchange, admitted, leaving_gate(request)),
        )

    async def _serve(
        self, request: web.Request, exchange: Exchange, inbound: Inbound, admitted: Admitted
    ) -> web.StreamResponse:
        """Answer the request within the tenant's limits. Raises RateLimited, and what the proxy raises."""
        if exchange.tenant.limits is None:
            return await self._proxy.forward(request, exchange, inbound, admitted)
        try:
            tokens, on_wait = inbound.prompt_tokens + inbound.answer_tokens, leaving_gate(request)
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
