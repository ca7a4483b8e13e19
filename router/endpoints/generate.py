"""The generating endpoints: handle one request from its bytes to its record."""

from __future__ import annotations

import asyncio
from functools import partial

from aiohttp import web

from engine.common.otel.tracer import Tracer
from engine.contract import headers
from engine.contract.errors import ApiError
from router.edge.admission import Admission, Admitted
from router.edge.client_keys import client_of, tenant_of
from router.edge.connection_limits import leaving_fifo
from router.edge.errors import error_response
from router.edge.headers import request_id
from router.endpoints.intake import Reading
from router.forwarding.exchange import Arrival, Exchange
from router.forwarding.proxy import Proxy
from router.forwarding.recorder import Recorder
from router.forwarding.running import Running
from router.reading.client_paths import passes
from router.tenants.limiter import Limiter


class Generate:
    """Handles every `Endpoint`, and the paths whose pods are chosen by load."""

    def __init__(
        self,
        admission: Admission,
        reading: Reading,
        proxy: Proxy,
        limiter: Limiter,
        recorder: Recorder,
        tracer: Tracer | None,
        *,
        total_timeout_s: float,
    ) -> None:
        self._admission = admission
        self._reading = reading
        self._proxy = proxy
        self._limiter = limiter
        self._recorder = recorder
        self._tracer = tracer
        self._total_timeout_s = total_timeout_s
        self._clock = asyncio.get_running_loop().time

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request."""
        now_s, incoming = self._clock(), request.headers
        trace = None if self._tracer is None else self._tracer.begin(incoming)
        arrival = Arrival(
            request_id(incoming),
            now_s,
            now_s + self._total_timeout_s,
            tenant_of(request),
            incoming.get(headers.SESSION),
            trace,
        )
        exchange = Exchange(arrival)
        try:
            with self._admission.request() as admitted:
                response = await self._serve(request, exchange, admitted)
            exchange.answered(exchange.status or response.status)
            return response
        except ApiError as error:
            self._recorder.refused(exchange, error)
            return error_response(error, arrival.request_id, rate_headers=exchange.rate_headers, path=request.path)
        except asyncio.CancelledError:
            exchange.client_left()
            raise
        finally:
            if exchange.inbound is not None and exchange.inbound.upload is not None:
                exchange.inbound.upload.close()
            self._recorder.ended(exchange, request.path, partial(client_of, request))

    async def pass_through(self, request: web.Request) -> web.StreamResponse:
        """Answer a request whose path the gateway does not know. Raises HTTPNotFound for paths that never pass."""
        if not passes(request.rel_url.raw_path):
            raise web.HTTPNotFound
        return await self.handle(request)

    async def _serve(self, request: web.Request, exchange: Exchange, admitted: Admitted) -> web.StreamResponse:
        """Answer the request within the tenant's limits. Raises RateLimited, and what the proxy raises.

        The request is charged before its body is read, and its tokens once they are known. So a tenant at a limit
        costs the gateway no more than heads.
        """
        arrival = exchange.arrival
        if arrival.tenant.limits is None:
            inbound = exchange.asks(await self._reading.request(request, arrival, admitted))
            return await self._proxy.forward(Running(request, exchange, inbound, admitted))
        async with self._limiter.take(arrival.tenant, on_wait=leaving_fifo(request)) as taking:
            exchange.limited(taking.headers())
            try:
                inbound = exchange.asks(await self._reading.request(request, arrival, admitted))
                await taking.needs(inbound.prompt_tokens + inbound.answer_tokens)
                exchange.limited(taking.headers())
                return await self._proxy.forward(Running(request, exchange, inbound, admitted))
            finally:
                taking.used = exchange.tokens_used
