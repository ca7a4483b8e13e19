"""Gateways agree on traffic shares through a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.events import DecodeError
from engine.contract.keys import PrefixKey
from engine.contract.redis_keys import shares_key
from router.peer_sync.keyed_values import KeyedValues
from router.peer_sync.shares import TrafficShareValues, decode_report, encode_report
from router.routing.prefill_shares import ModelShares
from router.routing.shares import KeyWeight, ShareReport, TrafficShares
from tests.conftest import wait_until
from tests.redis_server import RedisServer

KEYS = tuple(PrefixKey(k) for k in (11, 12, 13))


def counters() -> TrafficShares:
    return TrafficShares(half_life_s=30.0, limit=100, depth_strides=8)


@contextlib.asynccontextmanager
async def syncing(server: RedisServer, name: str, shares: TrafficShares | ModelShares) -> AsyncIterator[None]:
    own = ModelShares(name, shares) if isinstance(shares, TrafficShares) else shares
    exchange = KeyedValues(server.url, TrafficShareValues(name, lambda: {"llama": own}))
    task = asyncio.create_task(exchange.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled()
        await exchange.close()


async def test_two_gateways_come_to_see_the_same_shares(redis_server: RedisServer) -> None:
    now_s = asyncio.get_running_loop().time()
    a, b = counters(), counters()
    for _ in range(9):
        a.record(KEYS, 1.0, now_s)
    b.record((PrefixKey(99),), 1.0, now_s)
    async with syncing(redis_server, "a", a), syncing(redis_server, "b", b):
        loop = asyncio.get_running_loop()
        await wait_until(
            lambda: all(abs(shares.share(KEYS[0], loop.time()) - 0.9) < 0.01 for shares in (a, b)),
            what="agreement on the share of .9",
        )
        assert b.popular(0.5, loop.time()).keys() == set(KEYS)


async def test_two_gateways_part_the_pods_by_what_each_sends(redis_server: RedisServer) -> None:
    a, b = ModelShares("a", None), ModelShares("b", counters())
    a.prefill.sent(3.0)
    b.prefill.sent(1.0)
    async with syncing(redis_server, "a", a), syncing(redis_server, "b", b):
        now_s = asyncio.get_running_loop().time

        def parted() -> bool:
            low, high = a.prefill.partition(now_s()), b.prefill.partition(now_s())
            return low is not None and high is not None and abs(low.high - 0.75) + abs(high.low - 0.75) < 0.01

        await wait_until(parted, what="stretches of 0.75 and 0.25")


def test_a_report_of_the_release_before_has_no_version() -> None:
    report = ShareReport((KeyWeight(PrefixKey(7), None, 1.0),), 2.0, 3.0)
    assert decode_report(encode_report(report, 5.0)) == (report, 5.0)
    assert decode_report(b"[2.0,[[7,null,1.0]],5.0,3.0]") == (report, 5.0)


async def test_a_gateway_without_redis_follows_its_own_traffic(redis_server: RedisServer) -> None:
    redis_server.stop()
    a = counters()
    now_s = asyncio.get_running_loop().time()
    a.record(KEYS, 1.0, now_s)
    async with syncing(redis_server, "a", a):
        await asyncio.sleep(1.2)
        assert a.share(KEYS[0], now_s) == pytest.approx(1.0)
        redis_server.start()
        b = counters()
        b.record((PrefixKey(99),), 1.0, now_s)
        async with syncing(redis_server, "b", b):
            await wait_until(lambda: a.share(PrefixKey(99), asyncio.get_running_loop().time()) > 0.4)


async def test_a_gateway_leaves_a_server_that_was_demoted(redis_server: RedisServer) -> None:
    a = counters()
    a.record(KEYS, 1.0, asyncio.get_running_loop().time())
    async with syncing(redis_server, "a", a):
        await wait_until(lambda: b"a" in stored(redis_server))
        with redis_server.replaced() as old:
            old.replicaof("127.0.0.1", 1)  # the server continues to run, and refuses writes
            await wait_until(lambda: b"a" in stored(redis_server))


def stored(server: RedisServer) -> dict[bytes, bytes]:
    with redis.Redis.from_url(server.url) as client:
        return dict(client.hgetall(shares_key("llama")))


def store(server: RedisServer, written: dict[str, bytes]) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.hset(shares_key("llama"), mapping=written)


def redis_time_s(server: RedisServer) -> float:
    with redis.Redis.from_url(server.url) as client:
        return float(client.time()[0])


async def test_reports_of_gateways_that_are_gone_are_not_counted_and_go(redis_server: RedisServer) -> None:
    loop = asyncio.get_running_loop()
    now_s = redis_time_s(redis_server)
    old = ShareReport((KeyWeight(PrefixKey(55), None, 500.0),), 500.0)
    live = ShareReport((KeyWeight(PrefixKey(66), None, 8.0),), 8.0)
    store(
        redis_server,
        {
            "dead": encode_report(old, now_s - TrafficShareValues.kept_s - 5),
            "from another clock": encode_report(old, now_s + TrafficShareValues.kept_s + 60),
            "late": encode_report(live, now_s - 30),
            "live": encode_report(live, now_s),
            "garbage": b"[",
        },
    )
    a = counters()
    a.record(KEYS, 4.0, loop.time())
    async with syncing(redis_server, "a", a):
        await wait_until(lambda: b"a" in (there := stored(redis_server)) and b"dead" not in there)
        assert stored(redis_server).keys() == {b"a", b"late", b"live", b"garbage"}
        await wait_until(lambda: a.share(PrefixKey(66), loop.time()) > 0)
    assert a.share(PrefixKey(55), loop.time()) == 0.0
    # The weight of `live` is 8. `late` is a half-life old, so its weight is 8 / 2. The own traffic has 4.
    assert a.share(PrefixKey(66), loop.time()) == pytest.approx(12 / 16, abs=0.02)


key = st.integers(0, 2**64 - 1).map(PrefixKey)
weights = st.floats(0, 1e9, allow_nan=False)
reports = st.builds(
    ShareReport, st.lists(st.builds(KeyWeight, key, st.none() | key, weights), max_size=9).map(tuple), weights
)


@given(reports, weights)
def test_reports_survive_the_trip(report: ShareReport, written_s: float) -> None:
    assert decode_report(encode_report(report, written_s)) == (report, written_s)


STRANGE = [
    *(b"[]", b"[1]", b"[1,2]", b'[1,[["x",null,1]],0,0]', b"{}", b"[1,[[1]],0,0]", b"[1,[],null,0]", b"[1,[],[],0]"),
    *(b'["nan",[],0,0]', b'[1,[],"inf",0]', b"[-1,[],0,0]", b"[1,[[1,null,-1]],0,0]", b"[1,[],0,0,2]"),
]


@given(st.binary(max_size=60) | st.sampled_from(STRANGE))
def test_a_strange_report_is_refused(data: bytes) -> None:
    try:
        decode_report(data)
    except DecodeError:
        return
    assert data not in STRANGE
