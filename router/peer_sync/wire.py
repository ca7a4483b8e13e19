"""Redis as the store of gateways' messages and of their beliefs about pods. Each client has one connection."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from redis.asyncio import Redis

from engine.common.redis_client import connect, drop_connections
from engine.contract.redis_keys import PEER_STREAM, STREAM_DATA_FIELD, assumed_key

RETAIN_S = 45.0
"""Messages are kept at least this long, longer if that is cheaper: beliefs are written more often than this."""
KEPT_S = 600.0
"""Written beliefs about a pod are kept this long, even if no gateway is left to write them again."""
CLOCK_S = 30.0
"""How often Redis's clock is read."""
UNDERWAY_S = 5.0
"""The longest that a message can be on its way to Redis. If it seems longer, the sender's clock is wrong."""
EXPIRY_S = 10.0
"""How often the stream's expiry is set: with each message it would cost one more command."""
READ_ENTRIES = 256
PAGE_ENTRIES = 512

Entry = tuple[bytes, bytes]
"""An entry's id and its message."""


class PeerWire(Protocol):
    """A store of messages and beliefs. All calls except the last two raise REDIS_ERRORS."""

    async def time(self) -> float:
        """Return the seconds since 1970 by the clock that stamps the entries."""

    async def append(self, data: bytes, now_s: float) -> None:
        """Append a message for all gateways. `now_s`: the time by the clock of `time`, as far as known. Entries older
        than RETAIN_S may be removed."""

    async def newest(self) -> bytes:
        """Return the id of the last entry."""

    async def read(self, after: bytes, block_ms: int) -> list[Entry]:
        """Return the entries after `after`; waits for up to `block_ms` for the first."""

    def range(self, since_s: float, until: bytes) -> AsyncIterator[list[Entry]]:
        """Yield the entries from a time to an id, in pages."""

    async def put(self, pod: str, data: bytes) -> None:
        """Write all that is believed about a pod."""

    async def get(self, pods: Sequence[str]) -> list[bytes | None]:
        """Return what `put` wrote for each pod; None: nothing."""

    async def reset(self) -> None:
        """Drop the connections after an error: the next call connects again."""

    async def close(self) -> None:
        """Close the connections; no call may follow."""


class RedisClock:
    """Converts between Redis's clock and this process's clock, which is `offset_s` ahead of Redis's. Its users call
    `sync`."""

    def __init__(self) -> None:
        self.offset_s = 0.0
        self._synced_at_s = -math.inf

    async def sync(self, wire: PeerWire) -> None:
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


class RedisWire:
    """A `PeerWire` with one client. It connects at its first call."""

    def __init__(self, url: str) -> None:
        self._expiry_set_s = -math.inf
        self.redis: Redis = connect(url)
        for command in ("XREAD", "XRANGE"):
            self.redis.set_response_callback(command, _as_it_is)

    async def time(self) -> float:
        """See PeerWire."""
        seconds, microseconds = await self.redis.time()
        return float(seconds + microseconds / 1e6)

    async def append(self, data: bytes, now_s: float) -> None:
        """See PeerWire. The stream expires if nobody writes for long."""
        oldest = f"{max(0, int((now_s - RETAIN_S) * 1000))}-0"
        fields: Any = {STREAM_DATA_FIELD: data}
        await self.redis.xadd(PEER_STREAM, fields, minid=oldest, approximate=True)
        if now_s - self._expiry_set_s > EXPIRY_S:
            await self.redis.expire(PEER_STREAM, int(KEPT_S))
            self._expiry_set_s = now_s

    async def newest(self) -> bytes:
        """See PeerWire."""
        entries: Any = await self.redis.xrevrange(PEER_STREAM, count=1)
        return bytes(entries[0][0]) if entries else b"0-0"

    async def read(self, after: bytes, block_ms: int) -> list[Entry]:
        """See PeerWire."""
        streams: dict[Any, Any] = {PEER_STREAM: after}
        answer: Any = await self.redis.xread(streams, count=READ_ENTRIES, block=block_ms)
        found = answer.items() if isinstance(answer, dict) else answer or ()  # RESP3 has a map, RESP2 pairs
        return [entry for _, entries in found for entry in _entries(entries)]

    async def range(self, since_s: float, until: bytes) -> AsyncIterator[list[Entry]]:
        """See PeerWire."""
        start: Any = max(0, int(since_s * 1000))
        while True:
            entries: Any = await self.redis.xrange(PEER_STREAM, start, until, count=PAGE_ENTRIES)
            yield _entries(entries)
            if len(entries) < PAGE_ENTRIES:
                return
            start = b"(" + entries[-1][0]

    async def put(self, pod: str, data: bytes) -> None:
        """See PeerWire."""
        await self.redis.set(assumed_key(pod), data, px=int(KEPT_S * 1000))

    async def get(self, pods: Sequence[str]) -> list[bytes | None]:
        """See PeerWire."""
        found: Any = await self.redis.mget([assumed_key(pod) for pod in pods])
        return list(found)

    async def reset(self) -> None:
        """See PeerWire."""
        self._expiry_set_s = -math.inf
        await drop_connections(self.redis)

    async def close(self) -> None:
        """See PeerWire."""
        await self.redis.aclose()


def _entries(entries: Any) -> list[Entry]:
    """Return the entries as id and message; the message is empty if an entry has none."""
    return [
        (bytes(name), dict(zip(fields[::2], fields[1::2], strict=False)).get(STREAM_DATA_FIELD, b""))
        for name, fields in entries
    ]


def _as_it_is(response: Any, **kwargs: Any) -> Any:
    return response
