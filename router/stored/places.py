"""Which pod has which response or conversation: in this process's memory, and in Redis for the other gateways."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import orjson
from redis.asyncio import Redis

from engine.common.redis_client import REDIS_ERRORS, drop_connections
from engine.common.redis_loop import Outage, keep_trying
from engine.contract.bounded_json import loads
from engine.contract.redis_keys import place_key

log = logging.getLogger(__name__)

MAX_PLACES = 32_768
"""Kept in memory; each takes about 0.5 KB."""
PLACE_TTL_S = 6 * 3600.0
"""Seconds after the last turn. Engines keep responses in memory too, so a client has to send an older conversation in
full."""
ASK_S = 0.5
"""How long a request waits for Redis to say where its conversation is."""
MAX_PENDING = 4096
"""Places that wait to be written; beyond that, the oldest are not written."""
WRITTEN_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Place:
    """Where a response or a conversation is. `tokens`: its known tokens so far."""

    pod: str
    model: str
    tenant: str
    tokens: int = 0


class Places:
    """Finds places. Places that are not in memory may have been written to Redis by another gateway."""

    def __init__(self, clock: Callable[[], float], redis: Redis | None = None) -> None:
        """`redis`: None if gateways do not share."""
        self._clock = clock
        self._redis = redis
        self._known: OrderedDict[str, tuple[Place, float]] = OrderedDict()
        """Each place with the time at which it is forgotten, the oldest first."""
        self._pending: OrderedDict[str, Place | None] = OrderedDict()
        """Places to be written; None: the place is gone."""
        self._has_pending = asyncio.Event()
        self._outage = Outage(log, "places of conversations", "they are not shared")

    def __len__(self) -> int:
        return len(self._known)

    def put(self, name: str, place: Place) -> None:
        """Remember a place in this gateway."""
        self._known.pop(name, None)
        self._known[name] = (place, self._clock() + PLACE_TTL_S)
        while len(self._known) > MAX_PLACES:
            self._known.popitem(last=False)

    def share(self, name: str, place: Place) -> None:
        """Remember a place as `put` does, and soon tell the other gateways."""
        self.put(name, place)
        self._tell(name, place)

    def forget(self, name: str) -> None:
        """Forget a place. Other gateways no longer find it, unless they already have it in memory."""
        self._known.pop(name, None)
        self._tell(name, None)

    def _tell(self, name: str, place: Place | None) -> None:
        if self._redis is not None:
            self._pending.pop(name, None)
            self._pending[name] = place
            if len(self._pending) > MAX_PENDING:
                self._pending.popitem(last=False)
            self._has_pending.set()

    def known(self, name: str) -> Place | None:
        """Return the place if this gateway knows it."""
        found = self._known.get(name)
        if found is None:
            return None
        if self._clock() >= found[1]:
            del self._known[name]
            return None
        return found[0]

    async def find(self, name: str) -> Place | None:
        """Return the place; None if nobody knows it, or if Redis does not answer in time."""
        place = self.known(name)
        if place is not None or self._redis is None:
            return place
        try:
            async with asyncio.timeout(ASK_S):
                (value,) = await self._redis.mget([place_key(name)])
        except REDIS_ERRORS as error:
            self._outage.failed(error)
            return None
        place = _read(value)
        if place is not None:
            self.put(name, place)
        return place

    async def run(self) -> None:
        """Write what is shared, until cancelled. A place that cannot be written is skipped: it is still known here."""
        assert self._redis is not None
        await keep_trying(partial(self._write, self._redis), self._outage, partial(drop_connections, self._redis))

    async def _write(self, redis: Redis) -> None:
        await self._has_pending.wait()
        batch = [self._pending.popitem(last=False) for _ in range(min(WRITTEN_AT_ONCE, len(self._pending)))]
        if not self._pending:
            self._has_pending.clear()
        pipe: Any = redis.pipeline(transaction=False)
        for name, place in batch:
            if place is None:
                pipe.set(place_key(name), b"", ex=1)  # means no place; DEL would need one more permission
            else:
                pipe.set(place_key(name), orjson.dumps(asdict(place)), ex=round(PLACE_TTL_S))
        await pipe.execute()
        self._outage.succeeded()


def _read(value: object) -> Place | None:
    """Parse a place that another gateway wrote; None if it is not valid."""
    if not isinstance(value, bytes):
        return None
    try:
        place = Place(**loads(value))
    except (ValueError, TypeError):
        return None
    names = (place.pod, place.model, place.tenant)
    return place if all(isinstance(name, str) for name in names) and isinstance(place.tokens, int) else None
