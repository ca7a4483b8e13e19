"""Values that gateways keep for each other in Redis hashes: what answers have taught, and shares of traffic.

A value has a key, the hash's field, and carries the time of its writing by Redis's clock, because no two other clocks
agree. The last writer wins. A value that nobody writes any more is removed by whichever gateway finds it. Without Redis
a gateway goes on by itself.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

from redis.asyncio import Redis

from engine.common.redis_client import REDIS_ERRORS, connect, drop_connections
from engine.common.redis_loop import Outage, keep_trying
from engine.contract.events import DecodeError

log = logging.getLogger(__name__)

DEADLINE_S = 1.0
"""Seconds that one exchange may take."""
V = TypeVar("V")


class ValueKind(Protocol[V]):
    """One kind of values. Times are seconds of this process's loop, except where Redis's are named."""

    name: str
    """For the log."""
    first_s: float
    """Seconds until values are written if none was written or read before ..."""
    every_s: float
    """... and between two exchanges from then on."""
    kept_s: int
    """Seconds until a value that nobody writes is removed."""
    is_followed: bool
    """Whether others' values are read with each exchange. Otherwise they are only loaded once."""

    def hashes(self) -> Iterable[str]:
        """Return the Redis hashes that this gateway serves."""

    def own(self, name: str, now_s: float) -> Iterable[tuple[str, V]]:
        """Yield this gateway's values in a hash, with their fields."""

    def encode(self, value: V, written_s: float) -> bytes:
        """Return the value as bytes. `written_s`: by Redis's clock."""

    def decode(self, data: bytes) -> tuple[V, float]:
        """Return a value, and when it was written by Redis's clock. Raises DecodeError, also for other versions."""

    def use(self, name: str, field: str, value: V, written_s: float) -> None:
        """Take over another gateway's value. `written_s`: by this process's clock."""


class KeyedValues:
    """Exchanges the values of one kind. It survives every failure of Redis."""

    def __init__(self, redis_url: str, kind: ValueKind[Any]) -> None:
        self._redis: Redis = connect(redis_url)
        self._kind = kind
        self._outage = Outage(log, kind.name, "this gateway goes by what it knows itself", level=logging.INFO)
        self._written: dict[tuple[str, str], Any] = {}
        """The last own value of each hash and field, or the value that was loaded there."""
        self._read: dict[str, dict[bytes, tuple[bytes, float]]] = {}
        """Hash -> field -> what was read last, and when it was written by Redis's clock; NaN: it is not valid."""

    async def load(self) -> None:
        """Begin with what other gateways wrote. Takes DEADLINE_S at most."""
        try:
            await self._exchange(writes=False, reads=True)
        except REDIS_ERRORS as error:
            self._outage.failed(error)
            await drop_connections(self._redis)

    async def run(self) -> None:
        """Exchange values until cancelled."""
        await keep_trying(self._turn, self._outage, lambda: drop_connections(self._redis))

    async def close(self) -> None:
        """Write what is not written yet. Takes DEADLINE_S at most."""
        try:
            await self._exchange(writes=True, reads=False)
        except REDIS_ERRORS as error:
            self._outage.failed(error)
        await self._redis.aclose()

    async def _turn(self) -> None:
        await asyncio.sleep(self._kind.every_s if self._written else self._kind.first_s)
        await self._exchange(writes=True, reads=self._kind.is_followed)

    async def _exchange(self, *, writes: bool, reads: bool) -> None:
        for name in list(self._kind.hashes()):
            news: dict[str, Any] = {}
            for field, value in self._kind.own(name, asyncio.get_running_loop().time()) if writes else ():
                if value != self._written.get((name, field)):
                    news[field] = value
                await asyncio.sleep(0)  # requests go on between two values
            if news or reads:
                async with asyncio.timeout(DEADLINE_S):
                    await self._exchange_hash(name, news, reads=reads)
                self._outage.succeeded()

    async def _exchange_hash(self, name: str, news: dict[str, Any], *, reads: bool) -> None:
        kind = self._kind
        seconds, microseconds = await self._redis.time()
        redis_s = seconds + microseconds / 1e6
        async with self._redis.pipeline(transaction=False) as pipe:
            if news:
                fields: Any = {field: kind.encode(value, redis_s) for field, value in news.items()}
                pipe.hset(name, mapping=fields)
                pipe.expire(name, kind.kept_s)
            if reads:
                pipe.hgetall(name)
            *_, found = await pipe.execute()
        self._written |= {(name, field): value for field, value in news.items()}
        if reads:
            await self._take(name, found, redis_s)

    async def _take(self, name: str, found: dict[bytes, bytes], redis_s: float) -> None:
        """Use what is new, and remove what is too old. A gateway that still runs soon writes again."""
        kind, before, now_s = self._kind, self._read.get(name, {}), asyncio.get_running_loop().time()
        read = self._read[name] = {}
        for key, data in found.items():
            field = key.decode(errors="replace")
            is_news = key not in before or before[key][0] != data
            read[key] = (data, self._use(name, field, data, redis_s, now_s)) if is_news else before[key]
        # A time is in the future if Redis has come back with another clock.
        if gone := [key for key, (_, written_s) in read.items() if abs(redis_s - written_s) > kind.kept_s]:
            await self._redis.hdel(name, *gone)

    def _use(self, name: str, field: str, data: bytes, redis_s: float, now_s: float) -> float:
        """Use a value, unless it is this gateway's or too old. Return when it was written; NaN: it is not valid."""
        try:
            value, written_s = self._kind.decode(data)
        except DecodeError as error:
            log.warning("%s: the value of %r is skipped: %s", self._kind.name, field, error)
            return math.nan
        age_s = redis_s - written_s
        if (name, field) not in self._written and abs(age_s) <= self._kind.kept_s:
            self._kind.use(name, field, value, now_s - max(0.0, age_s))
            if not self._kind.is_followed:
                self._written[name, field] = value
        return written_s
