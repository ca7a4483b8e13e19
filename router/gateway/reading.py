"""A request read: put together and bound to a pod where an engine or a named cache has the beginning of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.contract.requests import Endpoint
from router.gateway.admission import Admitted
from router.gateway.conversations import Conversations
from router.gateway.exchange import Exchange
from router.gateway.inbound import Inbound, Reader
from router.gateway.named_cache import NamesCache
from router.gateway.named_caches import NamedCaches

KEYED = frozenset(str(endpoint) for endpoint in Endpoint)
"""Paths whose requests have prefixes; those of others are read as such that go by load."""


class Reading:
    """What a body says, and what is kept elsewhere of the same conversation."""

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
        """The request to `path`, `raw_path` as it was sent. `on_wait`: called where it has to wait. Raises ApiError."""
        tenant = exchange.tenant
        if path not in KEYED:
            return self._reader.read_by_load(raw_path, body, incoming, tenant)
        endpoint = Endpoint(path)
        try:
            inbound = self._reader.read(endpoint, body, incoming, tenant)
        except NamesCache as named:
            body = await self._named_caches.expand(endpoint, named.fields, body, tenant, admitted)
            inbound = self._reader.read(endpoint, body, incoming, tenant)
        if inbound.continues is None:
            return inbound
        on_wait()
        return await self._placed(endpoint, incoming, exchange, inbound, body)

    async def _placed(
        self, endpoint: Endpoint, incoming: Mapping[str, str], exchange: Exchange, inbound: Inbound, body: bytes
    ) -> Inbound:
        """The request, bound to the pod that has its conversation. A name stands for the model that was there before:
        what an engine keeps says nothing of the first user message. Raises ApiError."""
        place = await self._conversations.place(inbound, exchange.tenant.name)
        if place is None:
            return inbound
        if inbound.is_named and place.model != inbound.model:
            inbound = self._reader.read(endpoint, body, incoming, exchange.tenant, meant=place.model)
        return self._conversations.bound(inbound, place)
