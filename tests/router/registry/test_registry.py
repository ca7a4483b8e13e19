"""Publisher -> real Redis -> reader -> index: whatever happens to Redis or to an engine, the index comes to equal
what each engine holds."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest
import redis

from engine.contract.events import MessageKind, RegistryMessage, Tier, encode
from engine.contract.keys import PrefixKey
from engine.contract.load import LoadReport
from engine.contract.periods import Periods
from engine.contract.redis_keys import snapshot_key, stream_key
from router.views.types import PodId
from tests.conftest import wait_until
from tests.redis_server import RedisServer
from tests.router.registry.ends import LEASE_S, MODEL, FakeEngine, Gateway


async def test_changes_reach_the_index(redis_server: RedisServer) -> None:
    a, b = FakeEngine(redis_server, "a", epoch=1), FakeEngine(redis_server, "b", epoch=2)
    async with a.running(), b.running(), Gateway(redis_server).following(a, b) as gateway:
        a.change(dict.fromkeys(range(100), Tier.GPU))
        b.change(dict.fromkeys(range(50), Tier.GPU))
        await gateway.wait_equal(a, b)
        a.change({7: Tier.HOST, 8: Tier.DISK}, removed={1, 2, 3})
        b.change({}, removed=set(range(50)))
        await gateway.wait_equal(a, b)
        assert gateway.reader.reports(a.pod)
        await wait_until(lambda: gateway.loads[a.pod].running == len(a.keys))


async def test_a_changed_load_is_reported_at_once_and_an_unchanged_one_is_not(redis_server: RedisServer) -> None:
    engine = FakeEngine(redis_server, "a", epoch=1)
    engine.publisher._periods = Periods(heartbeat_s=1000.0)
    async with engine.running(), Gateway(redis_server).following(engine) as gateway:
        await wait_until(lambda: engine.pod in gateway.loads)
        engine.keys[PrefixKey(1)] = Tier.GPU  # the engine's load counts its keys, but no change of keys is published
        await wait_until(lambda: gateway.loads[engine.pod].running == 1)
        with redis.Redis.from_url(redis_server.url) as client:  # the publisher counts only what Redis has confirmed
            sent = client.xlen(stream_key(MODEL))
            await asyncio.sleep(0.5)
            assert client.xlen(stream_key(MODEL)) == sent


async def test_a_new_gateway_is_warm_before_it_is_ready(redis_server: RedisServer) -> None:
    engine = FakeEngine(redis_server, "a", epoch=1)
    async with engine.running(), Gateway(redis_server).following(engine) as first:
        engine.change(dict.fromkeys(range(1000), Tier.GPU))
        await first.wait_equal(engine)
        engine.change({5000: Tier.GPU}, removed={0, 1})  # this follows the snapshot, so it is only in the stream
        await first.wait_equal(engine)
        async with Gateway(redis_server).following(engine) as second:
            assert await second.reader.wait_warm(5.0)
            await second.wait_equal(engine)


async def test_a_gateway_is_warm_at_once_if_no_engine_publishes(redis_server: RedisServer) -> None:
    async with Gateway(redis_server).following(FakeEngine(redis_server, "silent", epoch=1)) as gateway:
        assert await gateway.reader.wait_warm(5.0)
        assert not gateway.reader.reports(PodId("silent"))
        assert not gateway.reader.expired


async def test_not_warm_while_redis_is_away(redis_server: RedisServer) -> None:
    redis_server.stop()
    async with Gateway(redis_server).following(FakeEngine(redis_server, "a", epoch=1)) as gateway:
        assert not await gateway.reader.wait_warm(0.3)
        assert not gateway.reader.status().connected
        assert "Redis" in (gateway.reader.status().last_error or "")


async def test_heartbeats_renew_a_lease(redis_server: RedisServer) -> None:
    engine = FakeEngine(redis_server, "a", epoch=1)
    key = snapshot_key(MODEL, engine.pod)
    with redis.Redis.from_url(redis_server.url) as client:
        async with engine.running():
            await wait_until(lambda: engine.publisher.stats.snapshots == 1)
            client.set(key, b"", keepttl=True)  # if another snapshot replaced this, the value would not be empty
            left_ms = [client.pttl(key)]

            def is_renewed() -> bool:
                left_ms.append(client.pttl(key))
                return bool(left_ms[-1] > left_ms[-2])

            await wait_until(is_renewed)
            assert client.get(key) == b""
        assert not client.exists(key), "the engine gives its lease up when it ends"


async def test_nothing_is_left_in_redis_for_ever(redis_server: RedisServer) -> None:
    """A model that is no longer served must not fill a Redis that evicts nothing."""
    engine = FakeEngine(redis_server, "a", epoch=1)
    engine.publisher._periods = Periods(snapshot_s=0.1)
    async with engine.running():
        await wait_until(lambda: engine.publisher.stats.snapshots >= 3)
    with redis.Redis.from_url(redis_server.url) as client:
        left = {key: client.ttl(key) for key in client.scan_iter()}
    assert left
    assert all(seconds > 0 for seconds in left.values()), left


async def test_a_gap_in_the_stream_is_mended_by_a_snapshot(redis_server: RedisServer) -> None:
    engine = FakeEngine(redis_server, "a", epoch=1)
    async with engine.running(), Gateway(redis_server).following(engine) as gateway:
        engine.change(dict.fromkeys(range(10), Tier.GPU))
        await gateway.wait_equal(engine)
        cursor = gateway.reader._cursors[engine.pod]
        cursor.seq -= 3  # as if three deltas had never come
        engine.change({99: Tier.GPU}, removed={1})
        await gateway.wait_equal(engine)
        assert gateway.reader.status().resyncs == 1
        assert cursor.synced


async def test_a_trimmed_stream_is_mended_by_a_snapshot_on_demand(redis_server: RedisServer) -> None:
    engine = FakeEngine(redis_server, "a", epoch=1)
    with redis.Redis.from_url(redis_server.url) as client:
        async with engine.running(), Gateway(redis_server).following(engine) as first:
            engine.change(dict.fromkeys(range(10), Tier.GPU))
            await first.wait_equal(engine)
            engine.change(dict.fromkeys(range(10, 20), Tier.GPU))
            await first.wait_equal(engine)
            snapshots = engine.publisher.stats.snapshots
            client.xtrim(stream_key(MODEL), maxlen=0, approximate=False)
            async with Gateway(redis_server).following(engine) as second:
                await second.wait_equal(engine, deadline_s=4.0)
            assert engine.publisher.stats.snapshots > snapshots


async def test_a_restarted_engine_begins_empty(redis_server: RedisServer) -> None:
    old = FakeEngine(redis_server, "a", epoch=1)
    gateway = Gateway(redis_server)
    async with gateway.following(old):
        async with old.running():
            old.change(dict.fromkeys(range(100), Tier.GPU))
            await gateway.wait_equal(old)
        new = FakeEngine(redis_server, "a", epoch=2)
        async with new.running():
            new.change({7: Tier.GPU, 1000: Tier.GPU})
            await gateway.wait_equal(new)


async def test_a_new_life_empties_the_index_before_its_snapshot_is_loaded(redis_server: RedisServer) -> None:
    engine = FakeEngine(redis_server, "a", epoch=1)
    async with engine.running(), Gateway(redis_server).following(engine) as gateway:
        engine.change({1: Tier.GPU})
        await gateway.wait_equal(engine)
        delta = encode(RegistryMessage(MessageKind.DELTA, 256, epoch=2, seq=1, load=LoadReport()))
        gateway.reader._take_delta((engine.pod.encode(), delta, b""))
        assert not gateway.held(engine.pod)


async def test_a_lost_connection_costs_no_lease(redis_server: RedisServer) -> None:
    engine, gateway = FakeEngine(redis_server, "a", epoch=1), Gateway(redis_server)
    gateway.reader._lease_s = 1000.0
    async with engine.running(), gateway.following(engine):
        engine.change({1: Tier.GPU})
        await gateway.wait_equal(engine)
        with redis.Redis.from_url(redis_server.url) as client:
            client.client_kill_filter(_type="normal", skipme=True)
        engine.change({2: Tier.GPU}, removed={1})
        await gateway.wait_equal(engine)


async def test_a_silent_pod_leaves_the_index_when_its_lease_ends(redis_server: RedisServer) -> None:
    dying, living = FakeEngine(redis_server, "a", epoch=1), FakeEngine(redis_server, "b", epoch=1)
    async with living.running(), Gateway(redis_server).following(dying, living) as gateway:
        async with dying.running():
            dying.change(dict.fromkeys(range(10), Tier.GPU))
            living.change(dict.fromkeys(range(10), Tier.GPU))
            await gateway.wait_equal(dying, living)
        await asyncio.sleep(LEASE_S / 3)
        assert gateway.held(dying.pod), "until its lease ends, the pod's keys are still believed"
        await wait_until(lambda: not gateway.held(dying.pod), LEASE_S + 2)
        await gateway.wait_equal(living)
        assert not gateway.reader.expired


async def test_flushall_is_survived(redis_server: RedisServer) -> None:
    engine = FakeEngine(redis_server, "a", epoch=1)
    async with engine.running(), Gateway(redis_server).following(engine) as gateway:
        engine.change(dict.fromkeys(range(100), Tier.GPU))
        await gateway.wait_equal(engine)
        with redis.Redis.from_url(redis_server.url) as client:
            client.flushall()
        engine.change({500: Tier.GPU}, removed={1})
        await gateway.wait_equal(engine)
        async with Gateway(redis_server).following(engine) as late:  # the engine has written its snapshot again, too
            await late.wait_equal(engine)


async def test_redis_stopped_and_restarted(redis_server: RedisServer) -> None:
    engine = FakeEngine(redis_server, "a", epoch=1)
    async with engine.running(), Gateway(redis_server).following(engine) as gateway:
        engine.change(dict.fromkeys(range(100), Tier.GPU))
        await gateway.wait_equal(engine)
        redis_server.stop()
        await wait_until(lambda: not gateway.reader.status().connected)
        engine.change({500: Tier.GPU}, removed={1})
        assert gateway.held(engine.pod), "the last known index is still used"
        await wait_until(lambda: gateway.reader.expired, LEASE_S + 3)
        await wait_until(lambda: not gateway.held(engine.pod), 2.0)
        redis_server.start()
        await gateway.wait_equal(engine)
        assert not gateway.reader.expired
        assert gateway.reader.status().connected


async def test_an_overflowing_publisher_drops_its_backlog_and_snapshots(redis_server: RedisServer) -> None:
    redis_server.stop()
    engine = FakeEngine(redis_server, "a", epoch=1, pending=1000)
    async with engine.running(), Gateway(redis_server).following(engine) as gateway:
        for start in range(0, 10_000, 100):
            engine.change(dict.fromkeys(range(start, start + 100), Tier.GPU))
            assert len(engine.publisher._pending) <= 1000
        assert engine.publisher.stats.dropped_keys > 0
        redis_server.start()
        await gateway.wait_equal(engine)


async def test_overflow_while_connected_leaves_a_hole_every_reader_sees(redis_server: RedisServer) -> None:
    engine = FakeEngine(redis_server, "a", epoch=1, pending=1000)
    async with engine.running(), Gateway(redis_server).following(engine) as gateway:
        engine.change({1: Tier.GPU})
        await gateway.wait_equal(engine)
        engine.change(dict.fromkeys(range(5000), Tier.GPU))
        assert engine.publisher.stats.dropped_keys == 5000
        await gateway.wait_equal(engine)


async def test_another_stride_is_refused_and_named(redis_server: RedisServer) -> None:
    engine = FakeEngine(redis_server, "a", epoch=1, stride=128)
    async with engine.running(), Gateway(redis_server, stride=256).following(engine) as gateway:
        engine.change({1: Tier.GPU})
        await wait_until(lambda: "must be of one release" in (gateway.reader.status().last_error or ""))
        assert not gateway.held(engine.pod)


async def test_a_defect_met_in_one_message_does_not_end_the_registry(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(redis_server, "a", epoch=1)
    async with engine.running(), Gateway(redis_server).following(engine) as gateway:
        engine.change({1: Tier.GPU})
        await gateway.wait_equal(engine)
        apply, calls = gateway.index.apply, []

        def fails_once(*args: object) -> None:
            calls.append(args)
            if len(calls) == 1:
                raise RuntimeError("a defect")
            apply(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(type(gateway.index), "apply", lambda self, *args: fails_once(*args))
        engine.change({2: Tier.GPU, 3: Tier.GPU}, removed={1})
        await gateway.wait_equal(engine)
        assert calls


async def test_a_pod_that_leaves_the_fleet_leaves_the_index(redis_server: RedisServer) -> None:
    engine = FakeEngine(redis_server, "a", epoch=1)
    async with engine.running(), Gateway(redis_server).following(engine) as gateway:
        engine.change({1: Tier.GPU})
        await gateway.wait_equal(engine)
        gateway.reader.set_pods({})
        assert not gateway.held(engine.pod)
        gateway.reader.set_pods({engine.pod: MODEL})
        await gateway.wait_equal(engine)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_any_mix_of_changes_and_faults_ends_in_agreement(redis_server: RedisServer, seed: int) -> None:
    rng = random.Random(seed)
    engines = [FakeEngine(redis_server, f"pod-{i}", epoch=i, pending=300) for i in range(4)]
    gateway = Gateway(redis_server)
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine.running())
        await stack.enter_async_context(gateway.following(*engines))
        for _ in range(60):
            engine = rng.choice(engines)
            stored = {rng.randrange(500): rng.choice(list(Tier)) for _ in range(rng.randrange(60))}
            engine.change(stored, removed={rng.randrange(500) for _ in range(rng.randrange(60))} - stored.keys())
            fault = rng.random()
            if fault < 0.05:
                redis_server.stop()
                await asyncio.sleep(rng.random() * 0.2)
                redis_server.start()
            elif fault < 0.15:
                with redis.Redis.from_url(redis_server.url) as client:
                    client.xtrim(stream_key(MODEL), maxlen=rng.randrange(3), approximate=False)
            elif fault < 0.2:
                with redis.Redis.from_url(redis_server.url) as client:
                    client.flushall()
            await asyncio.sleep(rng.random() * 0.05)
        await gateway.wait_equal(*engines)
