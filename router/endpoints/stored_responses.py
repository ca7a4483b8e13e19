"""Requests to read, list, cancel or delete a response that an engine keeps: each goes to the pod with the response."""

from __future__ import annotations

import asyncio
from functools import partial

from aiohttp import web

from engine.contract.errors import ApiError, Unavailable, quoted
from router.edge.admission import Admission
from router.edge.client_keys import client_of, tenant_of
from router.edge.connection_limits import leave_fifo
from router.edge.errors import RETRY_AFTER_S, error_response
from router.edge.headers import request_id
from router.fleet.fleet import Fleet
from router.forwarding.conversations import RESPONSE_ID, NotKept
from router.forwarding.exchange import Arrival, Exchange
from router.forwarding.proxy import Proxy
from router.forwarding.recorder import Recorder
from router.forwarding.running import Running
from router.reading.client_paths import LISTED, Kind
from router.reading.inbound import Inbound, inbound_by_load
from router.reading.names import check_allowed
from router.stored.places import Places
from router.tenants.tenant import Tenant
from router.views.types import PodId

STORED = tuple((listed.method, listed.pattern) for listed in LISTED if listed.kind is Kind.STORED)
"""Methods and paths. vLLM has GET and the POST to cancel; a pod answers with an error for a path that it does not
know."""


class StoredResponses:
    """Finds the pod with a response, for clients of the HTTP port and of the endpoint picker."""

    def __init__(self, fleet: Fleet, places: Places, policy: str) -> None:
        """`policy`: the name under which these requests are counted, though no policy decides."""
        self._fleet = fleet
        self._places = places
        self._policy = policy

    async def inbound(self, method: str, pattern: str, name: str, query: str, tenant: Tenant) -> Inbound:
        """Return the request of `tenant` about the response `name`, bound to its pod.

        Raises NotKept if the response is unknown or another tenant's (worded alike) or its pod is gone, and Unavailable
        if the pod is away.
        """
        place = await self._places.find(name) if RESPONSE_ID.fullmatch(name) else None
        if place is None or place.tenant != tenant.name:
            raise _not_found(name, "it is unknown here, was deleted, or was forgotten")
        check_allowed(tenant, place.model)
        pod = self._fleet.pod(PodId(place.pod))
        if pod is None:
            raise _not_found(name, "the engine that had it is gone")
        if pod not in self._fleet.pods(place.model):
            raise Unavailable(
                f"the engine that has response {quoted(name)} takes no requests at the moment: try again",
                param="response_id",
                code="no_engine",
                retry_after_s=RETRY_AFTER_S,
            )
        path = pattern.replace("{id}", name) + (f"?{query}" if query else "")
        return inbound_by_load(
            endpoint=f"{method} {pattern}",
            model=place.model,
            policy=self._policy,
            prompt_tokens=1,
            tokens_per_stride=1.0,
            output_tokens=1,
            body=b"",
            only=pod.pod_id,
            resource=(method, path),
        )

    def answered(self, method: str, name: str, status: int) -> None:
        """Forget a response that its pod has deleted."""
        if method == "DELETE" and status == 200:
            self._places.forget(name)


class Stored:
    """Answers requests for one response. They compute nothing, so they skip queues and tenants' limits."""

    def __init__(
        self,
        admission: Admission,
        responses: StoredResponses,
        proxy: Proxy,
        recorder: Recorder,
        total_timeout_s: float,
    ) -> None:
        self._admission = admission
        self._responses = responses
        self._proxy = proxy
        self._recorder = recorder
        self._total_timeout_s = total_timeout_s
        self._clock = asyncio.get_running_loop().time

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Return the pod's answer; 404 if the response is unknown or its pod is gone. The body is not read."""
        now_s = self._clock()
        deadline_s = now_s + self._total_timeout_s
        exchange = Exchange(Arrival(request_id(request.headers), now_s, deadline_s, tenant_of(request)))
        route = request.match_info.route.resource
        assert route is not None
        method, pattern, name = request.method, route.canonical, request.match_info["id"]
        try:
            with self._admission.request() as admitted:
                leave_fifo(request)
                query, tenant = request.rel_url.raw_query_string, exchange.arrival.tenant
                inbound = exchange.asks(await self._responses.inbound(method, pattern, name, query, tenant))
                response = await self._proxy.forward(Running(request, exchange, inbound, admitted))
            exchange.answered(exchange.status or response.status)
            self._responses.answered(method, name, exchange.status)
            return response
        except ApiError as error:
            self._recorder.refused(exchange, error)
            return error_response(error, exchange.arrival.request_id, path=request.path)
        except asyncio.CancelledError:
            exchange.client_left()
            raise
        finally:
            self._recorder.ended(exchange, pattern, partial(client_of, request))


def _not_found(name: str, why: str) -> NotKept:
    return NotKept(f"Response with id {quoted(name)} not found: {why}", param="response_id", code="response_not_found")
