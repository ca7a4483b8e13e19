"""Faults that do not pass by themselves: a demoted server that stays connected, defects, misconfigured engines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import pytest
import redis
from redis.exceptions import AuthenticationError
from redis.exceptions import ConnectionError as RedisAway

from engine.common.redis_loop import Outage
from engine.contract.events import Keys, Tier
from engine.contract.load import LoadReport
from engine.contract.redis_keys import stream_key
from router.registry.index import PrefixIndex
from router.registry.reader import RETRY_S
from router.views.types import PodId
from tests.conftest import wait_until
from tests.redis_server import RedisServer
from tests.router.registry.ends import LEASE_S, MODEL, FakeEngine, Gateway


async def test_a_publisher_leaves_a_server_that_was_demoted(redis_server: RedisServer) -> None:
    engine = FakeEngine(redis_server, "a", epoch=1)
    async with engine.running(), Gateway(redis_server).following(engine) as gateway:
        engine.change(dict.fromkeys(range(10), Tier.GPU))
        await gateway.wait_equal(engine)
        with redis_server.replaced() as old:
            old.replicaof("127.0.0.1", 1)  # the server continues to run, and refuses writes
            engine.change({500: Tier.GPU}, removed={1})
            await gateway.wait_equal(engine)


async def test_a_gateway_leaves_a_server_on_which_all_engines_are_silent(redis_server: RedisServer) -> None:
    before, after = FakeEngine(redis_server, "a", epoch=1), FakeEngine(redis_server, "a", epoch=2)
    async with Gateway(redis_server).following(before) as gateway:
        async with before.running():
            before.change({1: Tier.GPU})
            await gateway.wait_equal(before)
        with redis_server.replaced():  # the gateway stays connected to the old server
            async with after.running():
                after.change({2: Tier.GPU})
                await gateway.wait_equal(after)


async def test_a_gateway_is_connected_though_all_are_silent(redis_server: RedisServer) -> None:
    async with Gateway(redis_server).following(FakeEngine(redis_server, "silent", epoch=1)) as gateway:
        await wait_until(lambda: gateway.reader.status().connected)
        with redis.Redis.from_url(redis_server.url) as client:
            connections = client.info("stats")["total_connections_received"]
            began_s = asyncio.get_running_loop().time()
            while client.info("stats")["total_connections_received"] == connections:
                assert asyncio.get_running_loop().time() - began_s < LEASE_S + 5, (
                    "the gateway connected again because it heard nothing"
                )
                assert gateway.reader.status().connected
                await asyncio.sleep(0.01)


async def test_a_publisher_survives_a_defect(redis_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(redis_server, "a", epoch=1)
    load, calls = engine.publisher._load, list[None]()

    def fails_often() -> LoadReport:
        calls.append(None)
        if len(calls) in (3, 4, 6):
            raise RuntimeError("a defect")
        return load()

    engine.publisher._load = fails_often
    async with engine.running(), Gateway(redis_server).following(engine) as gateway:
        await wait_until(lambda: len(calls) > 6)
        engine.change({1: Tier.GPU})
        await gateway.wait_equal(engine)
    assert not engine.publisher.connected
    assert [record.exc_info for record in caplog.records if "a defect" in record.getMessage()]


@pytest.mark.parametrize("side", ["engine", "gateway"])
async def test_an_error_behind_another_is_logged(
    redis_server: RedisServer, side: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, gateway = FakeEngine(redis_server, "a", epoch=1), Gateway(redis_server)
    errors = [RedisAway("away"), RedisAway("away"), AuthenticationError("wrong password"), RedisAway("away")]

    async def fail(*args: object) -> None:
        if errors:
            raise errors.pop(0)
        await asyncio.Event().wait()

    monkeypatch.setattr("engine.loop.publish.MAX_BACKOFF_S", 0.01)
    monkeypatch.setattr("engine.common.redis_loop.LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(
        *((engine.publisher, "_flush", fail) if side == "engine" else (gateway.reader, "_follow", fail))
    )
    async with engine.running() if side == "engine" else gateway.following(engine):
        await wait_until(lambda: not errors)
        await asyncio.sleep(0.05)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [["away" in text, "wrong password" in text] for text in told] == [[True, False], [False, True]]


def test_an_outage_of_ever_new_errors_is_not_logged_without_end(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage(logging.getLogger("exchange"), "exchange", "it waits")

    def logged() -> int:
        return sum(record.levelno == logging.WARNING for record in caplog.records)

    for i in range(100):
        outage.failed(RedisAway(f"error {i}"))
    assert 0 < (first := logged()) < 10
    assert (outage.failures, outage.is_connected, outage.last_error) == (100, False, "Redis: error 99")
    outage.succeeded()
    assert (outage.is_connected, outage.last_error) == (True, None)
    outage.failed(RedisAway("error 0"))
    assert logged() == first + 1


async def test_two_engines_of_one_id_are_named_and_cost_little(redis_server: RedisServer) -> None:
    engine, twin = (FakeEngine(redis_server, "a", epoch=epoch) for epoch in (1, 2))
    gateway = Gateway(redis_server)
    clock = asyncio.get_running_loop().time
    async with engine.running(), gateway.following(engine):
        engine.change({1: Tier.GPU})
        await gateway.wait_equal(engine)
        began_s = clock()
        async with twin.running():
            while "--pod-id" not in (gateway.reader.status().last_error or "") or clock() - began_s < 1.2:
                assert clock() - began_s < 10, "nobody noticed"
                engine.change({2: Tier.GPU})
                twin.change({3: Tier.GPU})
                await asyncio.sleep(0.02)
        assert gateway.reader.status().resyncs <= (clock() - began_s) / RETRY_S + 2
        await gateway.wait_equal(engine)
        await wait_until(lambda: gateway.reader.status().last_error is None, LEASE_S + 3)


async def test_engines_of_another_stride_are_named_once_each(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [FakeEngine(redis_server, f"pod-{i}", epoch=1, stride=128) for i in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine.running())
        gateway = await stack.enter_async_context(Gateway(redis_server).following(*engines))
        await wait_until(lambda: "must be of one release" in (gateway.reader.status().last_error or ""))
        for i in range(5):
            for engine in engines:
                engine.change({i: Tier.GPU})
            await asyncio.sleep(0.1)
        await wait_until(lambda: all(engine.publisher.stats.deltas >= 5 for engine in engines))
    told = [record.getMessage() for record in caplog.records if "must be of one release" in record.getMessage()]
    assert len(told) == len(set(told)) == len(engines)


@pytest.mark.parametrize("is_absurd", [False, True])
async def test_an_engine_whose_snapshot_is_refused_costs_no_replays(
    redis_server: RedisServer, is_absurd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay reads what all engines have sent in the last seconds."""
    engine = FakeEngine(redis_server, "bad", epoch=1, stride=256 if is_absurd else 128)
    if is_absurd:
        engine.publisher._load = lambda: LoadReport(running=2**31)
    gateway = Gateway(redis_server)
    for name in ("_lease_s", "_silence_s"):
        monkeypatch.setattr(gateway.reader, name, 60.0)
    replays = []
    recent = gateway.reader._recent

    async def count(*args: Any) -> Any:
        replays.append(args)
        return await recent(*args)

    monkeypatch.setattr(gateway.reader, "_recent", count)
    clock = asyncio.get_running_loop().time
    async with engine.running(), gateway.following(engine):
        await wait_until(lambda: bool(replays))
        began_s, number = clock(), 0
        while clock() - began_s < 4 * RETRY_S:
            number += 1
            engine.change({number: Tier.GPU})
            await asyncio.sleep(0.05)
        assert len(replays) == 1
        assert gateway.reader.status().last_error
        good = FakeEngine(redis_server, "bad", epoch=2)
        async with good.running():
            good.change({7: Tier.GPU})
            await gateway.wait_equal(good)  # an engine that is put right is followed at once


async def test_the_tail_of_a_lost_stream_is_left(redis_server: RedisServer) -> None:
    engine = FakeEngine(redis_server, "a", epoch=1)
    ahead = b"99999999999999-0"  # the id comes from a clock that Redis no longer has
    with redis.Redis.from_url(redis_server.url) as client:
        async with engine.running(), Gateway(redis_server).following(engine) as gateway:
            client.xadd(stream_key(MODEL), {"x": "y"}, id=ahead)
            await wait_until(lambda: gateway.reader._tails.get(stream_key(MODEL), b"") >= ahead)
            client.delete(stream_key(MODEL))
            await wait_until(lambda: b"" < gateway.reader._tails.get(stream_key(MODEL), b"") < ahead)
            engine.change({1: Tier.GPU})
            await gateway.wait_equal(engine)


async def turning(ticks: list[int]) -> None:
    """Count the turns of the event loop."""
    while True:
        ticks[0] += 1
        await asyncio.sleep(0)


async def test_other_work_goes_on_between_the_snapshots_of_two_pods(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = [0]
    engines = [FakeEngine(redis_server, f"pod-{i}", epoch=1) for i in range(4)]
    loaded_at = []
    replace = PrefixIndex.replace

    def noted(index: PrefixIndex, pod: PodId, stored: tuple[Keys, Keys, Keys]) -> None:
        loaded_at.append(ticks[0])
        replace(index, pod, stored)

    monkeypatch.setattr(PrefixIndex, "replace", noted)
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            engine.change({1: Tier.GPU})
            await stack.enter_async_context(engine.running())
        await wait_until(lambda: all(engine.publisher.stats.deltas for engine in engines))
        turns = asyncio.create_task(turning(ticks))
        gateway = await stack.enter_async_context(Gateway(redis_server).following(*engines))
        async with asyncio.timeout(10):
            while not all(cursor.looked for cursor in gateway.reader._cursors.values()):  # noqa: ASYNC110  # at once
                await asyncio.sleep(0)
        assert gateway.agrees(*engines), "a cursor may only say that it has looked once its keys are in the index"
        turns.cancel()
    assert len(set(loaded_at[:4])) == 4


async def test_a_pod_that_serves_another_model_leaves_the_index(redis_server: RedisServer) -> None:
    engine = FakeEngine(redis_server, "a", epoch=1)
    async with engine.running(), Gateway(redis_server).following(engine) as gateway:
        engine.change({1: Tier.GPU})
        await gateway.wait_equal(engine)
        gateway.reader.set_pods({engine.pod: "another"})
        assert not gateway.held(engine.pod)
        gateway.reader._tails[stream_key(MODEL)] = b"0-0"
        await gateway.reader._load_pods(MODEL, [engine.pod])  # like a load of the pod that began earlier
        assert not gateway.held(engine.pod)
