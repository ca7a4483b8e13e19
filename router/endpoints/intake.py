"""Read a request, and add its named cache or bind it to the pod that has its conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.contract.requests import Endpoint
from router.edge.admission import Admitted
from router.forwarding.conversations import Conversations
from router.forwarding.exchange import Exchange
from router.reading.inbound import Inbound, Reader, endpoint_of
from router.reading.named_cache import NamesCache
from router.stored.named_caches import NamedCaches
from router.tenants.tenant import Tenant

KEYED = {str(endpoint): endpoint for endpoint in Endpoint}
"""Endpoints by path whose requests have prefixes. Requests to other paths are routed by load."""


class Reading:
    """Reads requests, with the parts of a conversation that are kept elsewhere."""

    def __init__(self, reader: Reader, named_caches: NamedCaches, conversations: Conversations) -> None:
        self._reader = reader
        self._named_caches = named_caches
        self._conversations = conversations

    async def read(
        self,
        path: str,
        raw_path: str,
        incoming: Mapping[str, str],
        body: bytes,
        exchange: Exchange,
        admitted: Admitted,
        on_wait: Callable[[], None] = lambda: None,
    ) -> Inbound:
        """Return the request to `path`, sent as `raw_path`. `on_wait` is called before a wait. Raises ApiError."""
        tenant = exchange.tenant
        endpoint = KEYED.get(path)
        if endpoint is None:
            return self._reader.read_by_load(raw_path, body, incoming, tenant, exchange.priority)
        try:
            inbound = self._reader.read(endpoint, body, incoming, tenant, priority=exchange.priority)
        except NamesCache as named:
            body = await self._named_caches.expand(endpoint, named.fields, body, tenant, admitted)
            inbound = self._reader.read(endpoint, body, incoming, tenant, priority=exchange.priority)
        if inbound.continues is None:
            return inbound
        on_wait()
        return await self._placed(endpoint, incoming, exchange, inbound, body)

    async def explained(self, body: bytes, incoming: Mapping[str, str], tenant: Tenant, admitted: Admitted) -> Inbound:
        """Return the request of `tenant` in `body`, which is not sent. The body's fields tell the endpoint.

        Raises ApiError.
        """
        try:
            return self._reader.read(None, body, incoming, tenant)
        except NamesCache as named:
            whole = await self._named_caches.expand(endpoint_of(named.fields), named.fields, body, tenant, admitted)
            return self._reader.read(None, whole, incoming, tenant)

    async def _placed(
        self, endpoint: Endpoint, incoming: Mapping[str, str], exchange: Exchange, inbound: Inbound, body: bytes
    ) -> Inbound:
        """Return the request, bound to the pod that has its conversation. Raises ApiError.

        If the request gives one of the operator's names, the name stands for the model that the conversation used
        before. The first user message, by which a model is chosen, is not in the request.
        """
        place = await self._conversations.place(inbound, exchange.tenant.name)
        if place is None:
            return inbound
        if inbound.is_named and place.model != inbound.model:
            tenant, model = exchange.tenant, place.model
            inbound = self._reader.read(endpoint, body, incoming, tenant, meant=model, priority=exchange.priority)
        return self._conversations.bound(inbound, place)
