"""The registry with a large fleet: engines publish less often, gateways read more at a time, nothing is lost."""

from __future__ import annotations

import asyncio
import random

import pytest
import redis

from engine.contract.events import MessageKind, RegistryMessage, Tier, encode
from engine.contract.keys import PrefixKey
from engine.contract.load import LoadReport
from engine.contract.periods import SMALL_FLEET, Periods, periods
from engine.contract.redis_keys import resync_key, snapshot_key, stream_key
from engine.loop.publish import FLEET_REMEMBERED_S
from router.registry import reader, wire
from router.views.types import PodId
from tests.conftest import wait_until
from tests.redis_server import RedisServer
from tests.router.registry.ends import LEASE_S, MODEL, FakeEngine, Gateway

LARGE = 1000


async def test_engines_of_a_large_fleet_come_to_the_same_index(redis_server: RedisServer) -> None:
    engines = [FakeEngine(redis_server, f"e{i}", epoch=1) for i in range(3)]
    silent = {PodId(f"silent-{i}"): MODEL for i in range(2 * SMALL_FLEET)}
    gateway = Gateway(redis_server)
    async with engines[0].running(), engines[1].running(), engines[2].running(), gateway.following(*engines):
        gateway.reader.set_pods({**silent, **{engine.pod: MODEL for engine in engines}})
        rng = random.Random(3)
        for engine in engines:
            engine.publisher.follow_pace(LARGE)
        for _ in range(10):
            for engine in engines:
                engine.change(dict.fromkeys(rng.sample(range(1000), 30), Tier.GPU), set(rng.sample(range(1000), 30)))
            await asyncio.sleep(0.03)
        await gateway.wait_equal(*engines)
        assert gateway.reader.status().resyncs == 0
        assert await gateway.reader.wait_warm(5.0)


async def test_an_engine_of_a_large_fleet_keeps_its_lease_and_hears_wishes(redis_server: RedisServer) -> None:
    engine = FakeEngine(redis_server, "a", epoch=1)
    engine.publisher.follow_pace(LARGE)
    assert engine.publisher._periods.heartbeat_s <= LEASE_S / 2, "gateways drop an engine that is silent for a lease"
    with redis.Redis.from_url(redis_server.url) as client:
        async with engine.running(), Gateway(redis_server).following(engine) as gateway:
            engine.change(dict.fromkeys(range(10), Tier.GPU))
            await gateway.wait_equal(engine)
            client.pexpire(snapshot_key(MODEL, engine.pod), 60_000)
            await wait_until(lambda: client.pttl(snapshot_key(MODEL, engine.pod)) <= 1000 * LEASE_S)
            written = engine.publisher.stats.snapshots
            client.set(resync_key(MODEL, engine.pod), b"1")
            await wait_until(lambda: engine.publisher.stats.snapshots > written)
            client.delete(snapshot_key(MODEL, engine.pod))
            await wait_until(lambda: bool(client.exists(snapshot_key(MODEL, engine.pod))))


@pytest.mark.looptime
async def test_the_largest_fleet_heard_of_lately_counts(redis_server: RedisServer) -> None:
    publisher = FakeEngine(redis_server, "a", epoch=1).publisher
    publisher._lease_s = 15.0
    publisher.follow_pace(1000)
    publisher.follow_pace(10)
    assert publisher._periods == periods(1000)
    await asyncio.sleep(FLEET_REMEMBERED_S / 2)
    publisher.follow_pace(1000)
    await asyncio.sleep(FLEET_REMEMBERED_S / 2 + 1)
    publisher.follow_pace(10)
    assert publisher._periods == periods(1000), "a gateway reported the large fleet again half a minute ago"
    await asyncio.sleep(FLEET_REMEMBERED_S / 2)
    publisher.follow_pace(10)
    assert publisher._periods == Periods()


async def test_a_gateway_replays_a_long_stream_in_pages(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "PAGE_ENTRIES", 3)
    monkeypatch.setattr(reader, "LOADS_AT_A_TIME", 2)
    engines = [FakeEngine(redis_server, f"e{i}", epoch=1) for i in range(5)]
    with redis.Redis.from_url(redis_server.url) as client:
        for engine in engines:  # the snapshot is empty, so all keys are in the stream after it
            snapshot = RegistryMessage(MessageKind.SNAPSHOT, 256, 1, 0, LoadReport())
            client.set(snapshot_key(MODEL, engine.pod), encode(snapshot), ex=60)
        for seq in range(1, 12):
            for number, engine in enumerate(engines):
                key = PrefixKey(1000 * number + seq)
                engine.keys[key] = Tier.GPU
                delta = RegistryMessage(MessageKind.DELTA, 256, 1, seq, LoadReport(), (), ((key,), (), ()))
                client.xadd(stream_key(MODEL), {"p": engine.pod, "d": encode(delta)})
        async with Gateway(redis_server).following(*engines) as gateway:
            await gateway.wait_equal(*engines)
            assert gateway.reader.status().resyncs == 0


async def test_new_entries_are_signs_of_life_and_replayed_entries_are_not(redis_server: RedisServer) -> None:
    lives: list[tuple[PodId, int]] = []
    gateway = Gateway(redis_server)
    gateway.reader._on_life = lambda pod, epoch: lives.append((pod, epoch))
    with redis.Redis.from_url(redis_server.url) as client:

        def delta(seq: int) -> bytes:
            return encode(RegistryMessage(MessageKind.DELTA, 256, 7, seq, LoadReport(running=seq)))

        ghost = FakeEngine(redis_server, "ghost", epoch=7)
        client.set(
            snapshot_key(MODEL, "ghost"), encode(RegistryMessage(MessageKind.SNAPSHOT, 256, 7, 0, LoadReport())), ex=60
        )
        client.xadd(stream_key(MODEL), {"p": "ghost", "d": delta(1)})
        async with gateway.following(ghost):
            await wait_until(lambda: ghost.pod in gateway.loads and gateway.loads[ghost.pod].running == 1)
            assert lives == []
            client.xadd(stream_key(MODEL), {"p": "ghost", "d": delta(2)})
            await wait_until(lambda: bool(lives))
            assert lives == [(ghost.pod, 7)]


async def test_odd_entries_are_no_end(redis_server: RedisServer) -> None:
    engine = FakeEngine(redis_server, "a", epoch=1)
    async with engine.running(), Gateway(redis_server).following(engine) as gateway:
        engine.change({1: Tier.GPU})
        await gateway.wait_equal(engine)
        with redis.Redis.from_url(redis_server.url) as client:
            client.xadd(stream_key(MODEL), {"x": b"1"})
            client.xadd(stream_key(MODEL), {"p": b"a"})
            client.xadd(stream_key(MODEL), {"other": b"1", "p": b"nobody", "d": b"\xff\xfe"})
        # The second entry names the pod but has no message. The replay after the snapshot may refuse it once more.
        await wait_until(lambda: gateway.reader.status().refused >= 1)
        engine.change({2: Tier.GPU})
        await gateway.wait_equal(engine)


async def test_a_registry_whose_only_speaker_has_left_has_expired(redis_server: RedisServer) -> None:
    speaker, dead = FakeEngine(redis_server, "speaker", epoch=1), FakeEngine(redis_server, "dead", epoch=1)
    async with Gateway(redis_server).following(speaker, dead) as gateway, speaker.running():
        async with dead.running():
            await wait_until(lambda: gateway.reader.reports(dead.pod) and gateway.reader.reports(speaker.pod))
        await wait_until(lambda: gateway.reader.status().pods_synced == 1)  # the lease of `dead` has run out
        assert not gateway.reader.expired
        gateway.reader.set_pods({dead.pod: MODEL})
        assert gateway.reader.expired
