"""Gateways agree on traffic shares through a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.keys import PrefixKey
from router.registry.share_sync import ShareSync, decode_report, encode_report
from router.routing.shares import KeyWeight, ShareReport, TrafficShares
from tests.conftest import wait_until
from tests.redis_server import RedisServer

KEYS = tuple(PrefixKey(k) for k in (11, 12, 13))


def counters() -> TrafficShares:
    return TrafficShares(half_life_s=30.0, limit=100, depth_strides=8)


@contextlib.asynccontextmanager
async def syncing(server: RedisServer, name: str, shares: TrafficShares) -> AsyncIterator[None]:
    task = asyncio.create_task(ShareSync(server.url, name, lambda: {"llama": shares}).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled()


async def test_two_gateways_come_to_see_the_same_shares(redis_server: RedisServer):
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


async def test_a_gateway_without_redis_follows_its_own_traffic(redis_server: RedisServer):
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


key = st.integers(0, 2**64 - 1).map(PrefixKey)
weights = st.floats(0, 1e9, allow_nan=False)
reports = st.builds(
    ShareReport, st.lists(st.builds(KeyWeight, key, st.none() | key, weights), max_size=9).map(tuple), weights
)


@given(reports)
def test_reports_survive_the_trip(report: ShareReport):
    assert decode_report(encode_report(report)) == report


@given(st.binary(max_size=60) | st.sampled_from([b"[]", b"[1]", b"[1,2]", b'[1,[["x",null,1]]]', b"{}", b"[1,[[1]]]"]))
def test_a_strange_report_is_ignored(data: bytes):
    assert decode_report(data) is None or isinstance(decode_report(data), ShareReport)
