"""Stores of named caches, in memory and in Redis, keep each cache for its time and show no other tenant's caches."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from blockbuster import BlockBuster

from engine.common.redis_client import connect
from engine.contract.errors import BadRequest, Unavailable
from engine.contract.redis_keys import named_caches_key
from router.reading.named_cache import CacheMeta, new_id
from router.stored.cache_store import CacheBounds, CacheStore, MemoryCaches, RedisCaches
from tests.redis_server import RedisServer

NOW_S = 1_700_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def store_of(kind: str, url: str, clock: Clock, bounds: CacheBounds) -> AsyncIterator[CacheStore]:
    if kind == "memory":
        yield MemoryCaches(bounds, clock)
        return
    async with connect(url) as redis:
        await redis.flushall()
        yield RedisCaches(redis, bounds, clock)


def meta_of(clock: Clock, ttl_s: float, contents: bytes = b"{}") -> CacheMeta:
    return CacheMeta(new_id(), "m", "", clock.now_s, clock.now_s, clock.now_s + ttl_s, len(contents), 1)


@pytest.mark.realtime
@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_a_store_keeps_each_for_its_time(
    kind: str, redis_server: RedisServer, no_blocking_calls: BlockBuster
) -> None:
    no_blocking_calls.deactivate()
    clock, bounds = Clock(), CacheBounds(2, 100)
    async with store_of(kind, redis_server.url, clock, bounds) as store:
        short, long = meta_of(clock, 10), meta_of(clock, 100)
        await store.add("t", short, b"short")
        await store.add("t", long, b"long")
        with pytest.raises(BadRequest, match="--named-caches"):
            await store.add("t", meta_of(clock, 10), b"x")
        await store.add("other", short, b"theirs")
        assert await store.get("other", short.id) == (short, b"theirs")
        assert await store.get("t", short.id) == (short, b"short")
        clock.now_s += 9
        renewed = await store.renew("t", short.id, clock.now_s + 20)
        assert renewed == replace(short, until_s=NOW_S + 29, updated_s=NOW_S + 9)
        clock.now_s += 19
        assert await store.get("t", short.id) == (renewed, b"short")
        assert await store.get("other", short.id) is None
        clock.now_s += 1
        assert await store.get("t", short.id) is None
        assert await store.renew("t", short.id, clock.now_s + 20) is None
        assert [meta.id for meta in await store.all_of("t")] == [long.id]
        await store.add("t", meta_of(clock, 10), b"room again")
        assert await store.remove("t", long.id)
        assert not await store.remove("t", long.id)
        assert await store.get("t", long.id) is None


async def test_what_has_expired_leaves_the_memory_though_its_tenant_does_not_come_back() -> None:
    clock = Clock()
    store, contents = MemoryCaches(CacheBounds(2, 100), clock), bytes(50)
    mine = sys.getrefcount(contents)
    await store.add("gone", meta_of(clock, 10), contents)
    clock.now_s += 9
    await store.add("other", meta_of(clock, 10), b"{}")
    assert sys.getrefcount(contents) > mine
    clock.now_s += 1
    await store.add("other", meta_of(clock, 10), b"{}")
    assert sys.getrefcount(contents) == mine


@pytest.mark.realtime
@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_a_cache_may_expire_while_it_is_stored_or_renewed(
    kind: str, redis_server: RedisServer, no_blocking_calls: BlockBuster
) -> None:
    no_blocking_calls.deactivate()

    class Running(Clock):
        def __call__(self) -> float:
            self.now_s += 1e-3
            return self.now_s

    clock = Running()
    async with store_of(kind, redis_server.url, clock, CacheBounds(2, 100)) as store:
        await store.add("t", meta_of(clock, 1e-9), b"short")
        assert await store.all_of("t") == []
        long = meta_of(clock, 100)
        await store.add("t", long, b"long")
        await store.renew("t", long.id, clock.now_s + 1e-9)
        assert await store.all_of("t") == []


@pytest.mark.realtime
async def test_what_another_release_stored_stays(redis_server: RedisServer, no_blocking_calls: BlockBuster) -> None:
    no_blocking_calls.deactivate()
    clock = Clock()
    async with (
        store_of("redis", redis_server.url, clock, CacheBounds(2, 100)) as store,
        connect(redis_server.url) as redis,
    ):
        await store.add("t", meta_of(clock, 10), b"ours")
        await redis.hset(named_caches_key("t"), "theirs", orjson.dumps({"id": "theirs", "form": 2}))
        clock.now_s += 20
        assert await store.all_of("t") == []
        assert await redis.hkeys(named_caches_key("t")) == [b"theirs"]


@pytest.mark.realtime
async def test_what_was_read_is_used_while_redis_is_away_and_nothing_else(
    tmp_path: Path, no_blocking_calls: BlockBuster
) -> None:
    no_blocking_calls.deactivate()
    server, clock = RedisServer(tmp_path), Clock()
    server.start()
    try:
        async with store_of("redis", server.url, clock, CacheBounds(9, 10)) as store:
            known, dropped = meta_of(clock, 100), meta_of(clock, 100)
            await store.add("t", dropped, b"abcdef")
            await store.add("t", known, b"uvwxyz")
            for meta in (dropped, known):  # together they exceed what is kept in memory
                assert await store.get("t", meta.id)
            server.stop()
            assert await store.get("t", known.id) == (known, b"uvwxyz")
            with pytest.raises(Unavailable):
                await store.get("t", dropped.id)
            with pytest.raises(Unavailable):
                await store.all_of("t")
            clock.now_s += 100
            with pytest.raises(Unavailable):
                await store.get("t", known.id)
    finally:
        server.stop()


@pytest.mark.realtime
async def test_many_tenants_that_fill_their_caches_evict_nobodys(
    redis_server: RedisServer, no_blocking_calls: BlockBuster
) -> None:
    """Redis evicts what was used least recently, whoever has it, when it is full."""
    no_blocking_calls.deactivate()
    clock, tenants, mib = Clock(), 6, 2**20
    async with connect(redis_server.url) as redis:
        await redis.flushall()
        await redis.config_set("maxmemory", f"{64 * mib}")
        await redis.config_set("maxmemory-policy", "allkeys-lru")
        try:
            store = RedisCaches(redis, CacheBounds(100, 64 * mib), clock, lambda: tenants)
            kept = meta_of(clock, 3600, bytes(mib))
            await store.add("polite", kept, bytes(mib))
            for tenant in range(1, tenants):
                for _ in range(5):
                    await store.add(f"t{tenant}", meta_of(clock, 3600, bytes(mib)), bytes(mib))
                with pytest.raises(BadRequest, match=r"a tenant may have 5\.3"):
                    await store.add(f"t{tenant}", meta_of(clock, 3600, bytes(mib)), bytes(mib))
            fresh = RedisCaches(redis, CacheBounds(100, 64 * mib), clock, lambda: tenants)
            assert await fresh.get("polite", kept.id) == (kept, bytes(mib))
            info = await redis.info("stats")
            assert info["evicted_keys"] == 0
            await redis.config_set("maxmemory", "0")
            alone = RedisCaches(redis, CacheBounds(100, 7 * mib), clock, lambda: tenants)
            await alone.add("t1", meta_of(clock, 3600, bytes(mib)), bytes(mib))  # Redis evicts nothing, so more fits
        finally:
            await redis.config_set("maxmemory", "0")
            await redis.config_set("maxmemory-policy", "noeviction")


async def test_many_tenants_fit_into_the_gateways_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.stored.cache_store.IN_MEMORY_BYTES", 100)
    clock = Clock()
    store = MemoryCaches(CacheBounds(9, 60), clock, lambda: 4)
    for tenant in ("a", "b", "c", "d"):
        await store.add(tenant, meta_of(clock, 10, bytes(25)), bytes(25))
        with pytest.raises(BadRequest, match="a tenant may have"):
            await store.add(tenant, meta_of(clock, 10, bytes(1)), bytes(1))
