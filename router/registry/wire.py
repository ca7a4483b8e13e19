"""Redis as readers and writers of streams see it: entries, strings and the clock, without redis-py's dictionaries.

redis-py makes a dictionary of each entry. That takes longer than all other work on a heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from engine.common.redis_client import connect, drop_connections

log = logging.getLogger(__name__)

READ_ENTRIES = 512
"""The most entries of a stream that one read returns."""
PAGE_ENTRIES = 2048
"""Entries of a page when a stream is replayed. Redis serves nobody else while it collects a page, for some ms."""
CLOCK_S = 30.0
"""How often Redis's clock is read."""

LAST_ID = f"{2**64 - 1}-{2**64 - 1}".encode()
"""The highest id of an entry. No further entry can be appended to a stream that has had it."""

SAID_AGAIN_S = 60.0
"""How often it is logged that a stream was removed."""

Entry = tuple[bytes, Sequence[bytes]]
"""An entry's id, and its fields and values in turn."""


class Wire(Protocol):
    """A store of streams and strings. All calls except the last two raise REDIS_ERRORS."""

    async def time(self) -> float:
        """Return the seconds since 1970 by the clock that stamps the entries."""

    async def append(self, stream: str, fields: Mapping[bytes, bytes], *, oldest_s: float, kept_s: float) -> None:
        """Append an entry. Entries from before `oldest_s`, by the store's clock, may be removed, and the stream
        `kept_s` after its last entry."""

    async def newest(self, stream: str) -> bytes:
        """Return the id of the stream's last entry; 0-0 if there is none."""

    async def read(self, tails: Mapping[str, bytes], block_ms: int) -> list[tuple[str, list[Entry]]]:
        """Return the entries after each stream's tail, at most READ_ENTRIES of each, for the streams that have some.
        Waits for up to `block_ms` for the first."""

    def range(self, stream: str, since_s: float, until: bytes) -> AsyncIterator[list[Entry]]:
        """Yield the entries from a time up to an id, in pages."""

    async def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the strings; None for those that do not exist."""

    async def put(self, key: str, data: bytes, kept_s: float) -> None:
        """Write a string, to be kept for a time."""

    async def revive(self, stream: str) -> None:
        """Remove a stream that has no entries: it may have had the last id."""

    async def reset(self) -> None:
        """Drop the connections after an error: the next call connects again."""

    async def close(self) -> None:
        """Close the connections."""


class RedisWire:
    """A `Wire` with one client. It connects at its first call."""

    def __init__(self, url: str) -> None:
        self._redis: Redis = connect(url)
        self._expiry_set_s: dict[str, float] = {}
        self._removed_at_s: dict[str, float] = {}
        for command in ("XREAD", "XRANGE"):
            self._redis.set_response_callback(command, _as_it_is)

    async def time(self) -> float:
        """See Wire."""
        seconds, microseconds = await self._redis.time()
        return float(seconds + microseconds / 1e6)

    async def append(self, stream: str, fields: Mapping[bytes, bytes], *, oldest_s: float, kept_s: float) -> None:
        """See Wire."""
        entry: Any = dict(fields)
        minid = f"{max(0, int(oldest_s * 1000))}-0"
        try:
            await self._redis.xadd(stream, entry, minid=minid, approximate=True)
        except ResponseError as error:
            await self._free(stream, error)
            await self._redis.xadd(stream, entry, minid=minid, approximate=True)
        now_s = asyncio.get_running_loop().time()
        if now_s - self._expiry_set_s.get(stream, -math.inf) > kept_s / 60:  # with each entry it would cost a command
            await self._redis.expire(stream, int(kept_s))
            self._expiry_set_s[stream] = now_s

    async def newest(self, stream: str) -> bytes:
        """See Wire."""
        try:
            entries: Any = await self._redis.xrevrange(stream, count=1)
        except ResponseError as error:
            await self._free(stream, error)
            return b"0-0"
        if not entries or await self._is_blocked(stream, entries[0][0]):
            return b"0-0"
        return bytes(entries[0][0])

    async def read(self, tails: Mapping[str, bytes], block_ms: int) -> list[tuple[str, list[Entry]]]:
        """See Wire."""
        streams: dict[Any, Any] = dict(tails)
        try:
            answer: Any = await self._redis.xread(streams, count=READ_ENTRIES, block=block_ms)
        except ResponseError as error:
            if not _is_wrong_type(error):
                raise
            for stream in tails:  # the error does not say which one it is
                await self.newest(stream)
            return []
        found = answer.items() if isinstance(answer, dict) else answer or ()  # RESP3 has a map, RESP2 pairs
        return [
            (stream, entries)
            for name, entries in found
            if entries and not await self._is_blocked(stream := name.decode(), entries[-1][0])
        ]

    async def range(self, stream: str, since_s: float, until: bytes) -> AsyncIterator[list[Entry]]:
        """See Wire."""
        start: Any = max(0, int(since_s * 1000))
        while True:
            try:
                entries: Any = await self._redis.xrange(stream, start, until, count=PAGE_ENTRIES)
            except ResponseError as error:
                await self._free(stream, error)
                return
            yield entries
            if len(entries) < PAGE_ENTRIES:
                return
            start = b"(" + entries[-1][0]

    async def _free(self, stream: str, error: ResponseError) -> None:
        """Remove what somebody has written in place of a stream: until then nobody can append to the stream. Raises
        `error` if it says something else."""
        if not _is_wrong_type(error):
            raise error
        await self._remove(stream, "is not a stream")

    async def _is_blocked(self, stream: str, newest: bytes) -> bool:
        """Return whether somebody has given the newest entry the last id, and remove the stream: Redis gives only
        higher ids."""
        if newest != LAST_ID:
            return False
        await self._remove(stream, "has an entry with the last id")
        return True

    async def revive(self, stream: str) -> None:
        """See Wire."""
        if not await self._redis.xrevrange(stream, count=1):
            await self._redis.set(stream, b"", px=1)

    async def _remove(self, stream: str, why: str) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._removed_at_s.get(stream, -math.inf) > SAID_AGAIN_S:
            log.error("registry: %s in Redis %s: somebody has written there, and it is removed", stream, why)
            self._removed_at_s[stream] = now_s
        await self._redis.set(stream, b"", px=1)  # DEL would need one more permission
        await asyncio.sleep(0.01)  # until it has expired

    async def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """See Wire."""
        found: Any = await self._redis.mget(keys)
        return list(found)

    async def put(self, key: str, data: bytes, kept_s: float) -> None:
        """See Wire."""
        await self._redis.set(key, data, px=int(kept_s * 1000))

    async def reset(self) -> None:
        """See Wire."""
        self._expiry_set_s.clear()
        await drop_connections(self._redis)

    async def close(self) -> None:
        """See Wire."""
        await self._redis.aclose()


class RedisClock:
    """Converts between Redis's clock and this process's clock, which is `offset_s` ahead of Redis's. Its users call
    `sync`."""

    def __init__(self) -> None:
        self.offset_s = 0.0
        self._synced_at_s = -math.inf

    async def sync(self, wire: Wire) -> None:
        """Ask Redis for the time, unless that was done in the last CLOCK_S. Raises REDIS_ERRORS."""
        clock = asyncio.get_running_loop().time
        asked_s = clock()
        if asked_s - self._synced_at_s <= CLOCK_S:
            return
        redis_s = await wire.time()
        self._synced_at_s = clock()
        offset_s, unsure_s = (asked_s + self._synced_at_s) / 2 - redis_s, (self._synced_at_s - asked_s) / 2
        if abs(offset_s - self.offset_s) > unsure_s:  # a slow answer is too imprecise to change the offset
            self.offset_s = offset_s

    def lost(self) -> None:
        """Note that the next connection may lead to another server, with another clock."""
        self._synced_at_s = -math.inf

    def here(self, redis_s: float) -> float:
        """Convert a time of Redis to this process's clock."""
        return redis_s + self.offset_s

    def there(self, here_s: float) -> float:
        """Convert a time of this process's clock to Redis's."""
        return here_s - self.offset_s


def sent_at(entry_id: bytes) -> float:
    """Return when Redis got the entry, in seconds since 1970."""
    return int(entry_id.partition(b"-")[0]) / 1000


def _is_wrong_type(error: ResponseError) -> bool:
    return str(error).startswith("WRONGTYPE")


def _as_it_is(response: Any, **kwargs: Any) -> Any:
    return response
