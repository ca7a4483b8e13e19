"""The generating endpoints: one request from its bytes to its record."""

from __future__ import annotations

import asyncio

from aiohttp import web

from engine.contract.errors import ApiError
from engine.contract.requests import Endpoint
from router.gateway.admission import Admission
from router.gateway.body import read_body
from router.gateway.chooser import Chooser
from router.gateway.errors import NoEngine, error_response
from router.gateway.exchange import CLIENT_GONE, Exchange
from router.gateway.headers import request_id
from router.gateway.inbound import Reader
from router.gateway.proxy import Proxy
from router.telemetry.log import RequestLog, RequestRecord
from router.telemetry.metrics import Metrics


class Generate:
    """Handles `/v1/chat/completions` and `/v1/completions`."""

    def __init__(
        self,
        admission: Admission,
        reader: Reader,
        chooser: Chooser,
        proxy: Proxy,
        metrics: Metrics,
        request_log: RequestLog,
        *,
        total_timeout_s: float,
    ) -> None:
        self._admission = admission
        self._reader = reader
        self._chooser = chooser
        self._proxy = proxy
        self._metrics = metrics
        self._request_log = request_log
        self._total_timeout_s = total_timeout_s
        self._clock = asyncio.get_running_loop().time

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """The answer to a request."""
        now_s = self._clock()
        exchange = Exchange(request_id(request.headers), now_s, now_s + self._total_timeout_s)
        try:
            with self._admission.request() as admitted:
                body = await read_body(request, admitted, exchange.deadline_s)
                inbound = exchange.inbound = self._reader.read(Endpoint(request.path), body, request.headers)
                response = await self._proxy.forward(request, exchange, inbound)
            exchange.status = exchange.status or response.status
            return response
        except ApiError as error:
            exchange.status, exchange.error = error.status, error.message
            if isinstance(error, NoEngine):
                self._metrics.unserved(error.model)
            return error_response(error, exchange.request_id)
        except asyncio.CancelledError:
            exchange.status, exchange.error = CLIENT_GONE, "client gone"
            raise
        finally:
            self._record(request, exchange)

    def _record(self, request: web.Request, exchange: Exchange) -> None:
        choice, inbound, first_byte_s = exchange.choice, exchange.inbound, exchange.first_byte_s
        policy = choice.policy if choice else ""
        pod = choice.pod.pod_id if choice else ""
        self._metrics.answered(policy, pod, exchange.status or 500)
        if choice and inbound and first_byte_s is not None:
            self._metrics.first_byte(policy, first_byte_s - exchange.arrived_s)
            if exchange.status == 200:
                self._chooser.learn(inbound, choice, exchange.usage)
                predicted_s = choice.decision.predicted_ttft_s
                if predicted_s is not None and inbound.stream:
                    self._metrics.predicted(predicted_s, first_byte_s - exchange.sent_s)
        if not self._request_log.enabled:
            return
        now_s = self._clock()
        self._request_log.write(
            RequestRecord(
                request_id=exchange.request_id,
                path=request.path,
                model=inbound.model if inbound else "",
                policy=policy,
                pod=pod,
                status=exchange.status or 500,
                attempts=exchange.attempts,
                prompt_tokens_estimated=inbound.prompt_tokens if inbound else 0,
                cached_tokens_predicted=choice.cached_tokens if choice else 0,
                cached_tokens=exchange.usage.cached_tokens,
                first_byte_ms=None if first_byte_s is None else round(1000 * (first_byte_s - exchange.arrived_s), 2),
                total_ms=round(1000 * (now_s - exchange.arrived_s), 2),
                error=exchange.error,
            )
        )
