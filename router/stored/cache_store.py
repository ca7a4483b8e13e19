"""The stores of named caches: this gateway's memory, or Redis for all gateways."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import orjson
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from engine.common.redis_client import REDIS_ERRORS
from engine.contract.bounded_json import loads
from engine.contract.errors import BadRequest, Unavailable
from engine.contract.redis_keys import named_cache_key, named_caches_key
from router.edge.errors import RETRY_AFTER_S
from router.reading.named_cache import CacheMeta

MIB = 2**20
IN_MEMORY_BYTES = 128 * MIB
"""Contents of all tenants' caches in a gateway's memory, without Redis."""
SHARE = 0.5
"""Share of Redis's memory (`maxmemory`) for named caches. What engines publish and the accounts of limits need the
rest."""
ASSUMED_BYTES = 256.0 * MIB
"""Redis's memory if it may not be asked for: what the chart gives it."""
ASKED_AGAIN_S = 60.0
_SLACK_MS = 1000
"""Contents outlive their metadata by this time, so that a reader of the metadata still finds the contents."""


@dataclass(frozen=True, slots=True)
class CacheBounds:
    """Bounds on the named caches of each tenant."""

    count: int
    size: int
    """Bytes of contents."""


def share_of(bounds: CacheBounds, total: float, tenants: int) -> CacheBounds:
    """Return the bounds on each of `tenants` tenants if their caches together may have `total` bytes."""
    return replace(bounds, size=min(bounds.size, int(total / max(1, tenants))))


class CacheStore(Protocol):
    """Named caches by tenant. No method returns an expired cache. All raise Unavailable if the store is down."""

    async def add(self, owner: str, meta: CacheMeta, contents: bytes) -> None:
        """Store a cache. Raises BadRequest, naming the bound, if the tenant would exceed it."""
        ...

    async def get(self, owner: str, cache_id: str) -> tuple[CacheMeta, bytes] | None:
        """Return a cache with its contents, which never change; None if there is none."""
        ...

    async def all_of(self, owner: str) -> list[CacheMeta]:
        """Return all caches of the tenant, oldest first."""
        ...

    async def renew(self, owner: str, cache_id: str, until_s: float) -> CacheMeta | None:
        """Keep a cache until `until_s`. Return None if it is gone."""
        ...

    async def remove(self, owner: str, cache_id: str) -> bool:
        """Delete a cache. Return False if it was gone."""
        ...


class MemoryCaches:
    """Named caches in the memory of this process."""

    def __init__(
        self, bounds: CacheBounds, clock: Callable[[], float] = time.time, tenants: Callable[[], int] = lambda: 1
    ) -> None:
        """`clock`: seconds since 1970. `tenants`: how many there are."""
        self._bounds = bounds
        self._clock = clock
        self._tenants = tenants
        self._kept: dict[str, dict[str, tuple[CacheMeta, bytes]]] = {}

    async def add(self, owner: str, meta: CacheMeta, contents: bytes) -> None:
        """See CacheStore."""
        for other in list(self._kept):  # also drop expired caches of tenants that never come back
            if not self._alive(other):
                del self._kept[other]
        bounds = share_of(self._bounds, IN_MEMORY_BYTES, self._tenants())
        check_bounds([*await self.all_of(owner), meta], bounds)
        self._kept.setdefault(owner, {})[meta.id] = (meta, contents)

    async def get(self, owner: str, cache_id: str) -> tuple[CacheMeta, bytes] | None:
        """See CacheStore."""
        return self._alive(owner).get(cache_id)

    async def all_of(self, owner: str) -> list[CacheMeta]:
        """See CacheStore."""
        return in_order([meta for meta, _ in self._alive(owner).values()])

    async def renew(self, owner: str, cache_id: str, until_s: float) -> CacheMeta | None:
        """See CacheStore."""
        found = self._alive(owner).get(cache_id)
        if found is None:
            return None
        meta = replace(found[0], until_s=until_s, updated_s=self._clock())
        self._kept[owner][cache_id] = (meta, found[1])
        return meta

    async def remove(self, owner: str, cache_id: str) -> bool:
        """See CacheStore."""
        return self._alive(owner).pop(cache_id, None) is not None

    def _alive(self, owner: str) -> dict[str, tuple[CacheMeta, bytes]]:
        """Drop the tenant's expired caches and return the others."""
        kept, now_s = self._kept.get(owner, {}), self._clock()
        for cache_id in [cache_id for cache_id, (meta, _) in kept.items() if meta.until_s <= now_s]:
            del kept[cache_id]
        return kept


class RedisCaches:
    """Named caches in Redis: a hash for each tenant with its caches' metadata, and a string for each cache's contents.

    The contents that this gateway used last stay in its memory, so a request for them reads the hash alone. While Redis
    is down, requests use contents in memory until the cache expires according to the metadata that was last read.
    """

    def __init__(
        self,
        redis: Redis,
        bounds: CacheBounds,
        clock: Callable[[], float] = time.time,
        tenants: Callable[[], int] = lambda: 1,
    ) -> None:
        """`clock`: seconds since 1970. `tenants`: how many there are."""
        self._tenants = tenants
        self._redis_bytes = 0.0
        """Bytes that Redis may hold before it evicts something."""
        self._redis_asked_s = -math.inf
        self._redis = redis
        self._bounds = bounds
        self._clock = clock
        self._near: OrderedDict[tuple[str, str], tuple[CacheMeta, bytes]] = OrderedDict()
        self._near_size = 0

    async def add(self, owner: str, meta: CacheMeta, contents: bytes) -> None:
        """See CacheStore."""
        bounds = await self._bounds_of_each()
        check_bounds([*await self.all_of(owner), meta], bounds)
        left_ms = self._left_ms(meta)
        try:
            await self._redis.set(named_cache_key(owner, meta.id), contents, px=left_ms)
            await self._say(owner, meta)
            check_bounds(await self.all_of(owner), bounds)  # another gateway may have added one meanwhile
        except BadRequest:
            await self.remove(owner, meta.id)
            raise
        except REDIS_ERRORS as error:
            raise _away(error) from None

    async def get(self, owner: str, cache_id: str) -> tuple[CacheMeta, bytes] | None:
        """See CacheStore."""
        near = self._near.get((owner, cache_id))
        try:
            meta = next((meta for meta in await self._all(owner) if meta.id == cache_id), None)
            if meta is None:
                self._forget(owner, cache_id)
                return None
            contents: Any = near[1] if near else (await self._redis.mget(named_cache_key(owner, cache_id)))[0]
        except REDIS_ERRORS as error:
            if near is None or near[0].until_s <= self._clock():
                raise _away(error) from None
            return near
        if contents is None:
            return None
        self._remember(owner, meta, contents)
        return meta, contents

    async def all_of(self, owner: str) -> list[CacheMeta]:
        """See CacheStore."""
        try:
            return in_order(await self._all(owner))
        except REDIS_ERRORS as error:
            raise _away(error) from None

    async def renew(self, owner: str, cache_id: str, until_s: float) -> CacheMeta | None:
        """See CacheStore."""
        try:
            found = next((meta for meta in await self._all(owner) if meta.id == cache_id), None)
            if found is None:
                return None
            meta = replace(found, until_s=until_s, updated_s=self._clock())
            if not await self._redis.pexpire(named_cache_key(owner, cache_id), self._left_ms(meta)):
                return None
            await self._say(owner, meta)
        except REDIS_ERRORS as error:
            raise _away(error) from None
        return meta

    async def remove(self, owner: str, cache_id: str) -> bool:
        """See CacheStore."""
        self._forget(owner, cache_id)
        try:
            was_there = await self._redis.hdel(named_caches_key(owner), cache_id)
            await self._redis.pexpire(named_cache_key(owner, cache_id), 1)
        except REDIS_ERRORS as error:
            raise _away(error) from None
        return bool(was_there)

    async def _all(self, owner: str) -> list[CacheMeta]:
        """Remove the tenant's expired caches from the hash and return the others.

        Entries that this release cannot read stay: another release may have written them, and the hash itself expires.
        """
        found: Any = await self._redis.hgetall(named_caches_key(owner))
        metas, now_s = [meta for value in found.values() if (meta := _read(value)) is not None], self._clock()
        if expired := [meta.id for meta in metas if meta.until_s <= now_s]:
            await self._redis.hdel(named_caches_key(owner), *expired)
        return [meta for meta in metas if meta.until_s > now_s]

    async def _say(self, owner: str, meta: CacheMeta) -> None:
        await self._redis.hset(named_caches_key(owner), meta.id, orjson.dumps(asdict(meta)))
        if alive := await self._all(owner):  # none may be left: a cache may live for a nanosecond
            longest_s = max(other.until_s for other in alive)
            await self._redis.pexpire(named_caches_key(owner), int(1000 * (longest_s - self._clock())) + _SLACK_MS)

    async def _bounds_of_each(self) -> CacheBounds:
        """Return the bounds on each tenant now: all tenants' caches together fit into SHARE of Redis's memory, so that
        Redis evicts nobody's for another's. Raises Unavailable."""
        now_s = self._clock()
        if now_s - self._redis_asked_s > ASKED_AGAIN_S:
            try:
                facts: Any = await self._redis.info("memory")
                self._redis_bytes = float(facts["maxmemory"]) or math.inf
            except NoPermissionError:  # rules of an earlier release
                self._redis_bytes = ASSUMED_BYTES
            except REDIS_ERRORS as error:
                raise _away(error) from None
            self._redis_asked_s = now_s
        if self._redis_bytes == math.inf:
            return self._bounds
        return share_of(self._bounds, SHARE * self._redis_bytes, self._tenants())

    def _left_ms(self, meta: CacheMeta) -> int:
        return max(1, int(1000 * (meta.until_s - self._clock()))) + _SLACK_MS

    def _remember(self, owner: str, meta: CacheMeta, contents: bytes) -> None:
        self._forget(owner, meta.id)
        self._near[owner, meta.id] = (meta, contents)
        self._near_size += len(contents)
        while self._near_size > self._bounds.size:
            _, (_, dropped) = self._near.popitem(last=False)
            self._near_size -= len(dropped)

    def _forget(self, owner: str, cache_id: str) -> None:
        found = self._near.pop((owner, cache_id), None)
        if found is not None:
            self._near_size -= len(found[1])


def check_bounds(metas: Collection[CacheMeta], bounds: CacheBounds) -> None:
    """Raise BadRequest, naming the bound, if `metas` exceed what a tenant may have."""
    if len(metas) > bounds.count:
        raise BadRequest(
            f"there are {len(metas) - 1} named caches already, as many as --named-caches allows: delete one, or let "
            "them expire",
            code="too_many_caches",
        )
    size = sum(meta.size for meta in metas)
    if size > bounds.size:
        raise BadRequest(
            f"with this one, named caches have {size / MIB:.1f} MiB; a tenant may have {bounds.size / MIB:g}: "
            "delete one, or store less",
            code="caches_too_large",
        )


def in_order(metas: Collection[CacheMeta]) -> list[CacheMeta]:
    """Return the caches, oldest first."""
    return sorted(metas, key=lambda meta: (meta.created_s, meta.id))


def _read(value: bytes) -> CacheMeta | None:
    """Return the metadata that a gateway has written; None if another version wrote it and it cannot be read."""
    try:
        fields: Any = loads(value)
        return CacheMeta(**fields)
    except (orjson.JSONDecodeError, TypeError):
        return None


def _away(error: Exception) -> Unavailable:
    return Unavailable(
        f"named caches cannot be read at the moment: Redis does not answer ({type(error).__name__})",
        code="caches_unavailable",
        retry_after_s=RETRY_AFTER_S,
    )
