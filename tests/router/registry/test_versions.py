"""Messages of engines of other releases: those of the previous release are understood, later ones are skipped."""

from __future__ import annotations

import pytest
import redis

from engine.contract.events import DecodeError, Keys, MessageKind, RegistryMessage, Tier, UnknownVersion, decode, encode
from engine.contract.fetch_costs import FetchCost, FetchCosts
from engine.contract.keys import PrefixKey
from engine.contract.load import LoadReport, StepCost
from engine.contract.redis_keys import snapshot_key, stream_key
from tests.conftest import wait_until
from tests.redis_server import RedisServer
from tests.router.registry.ends import MODEL, FakeEngine, Gateway

FIRST_DELTA = (
    "01010000000100008877665544332211090000000000000001000000020000000300000000000000040000000500000000000000"
    "060000000700000010000000fa7e6abc7493783f2d431cebe2361a3fbbbdd7d9df7cbb3d00000000000000002d431cebe2361a3f"
    "010000000200000000000000010000000a000000000000000b000000000000000c000000000000000d00000000000000"
)
FIRST_SNAPSHOT = (
    "01020000400000000200000000000000030000000000000000000000000000000000000000000000000000000000000000000000"
    "00000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
    "0000000001000000010000000000000005000000000000000600000000000000"
)
"""Messages as the first release wrote them."""


def test_the_first_release_is_understood_and_written() -> None:
    load = LoadReport(1, 2, 3, 4, 5, 6, 7, 16, StepCost(0.006, 1e-4, 2.5e-11, 0.0, 1e-4))
    delta = RegistryMessage(MessageKind.DELTA, 256, 0x1122334455667788, 9, load, keys(10), (keys(11, 12), (), keys(13)))
    snapshot = RegistryMessage(MessageKind.SNAPSHOT, 64, 2, 3, LoadReport(), (), (keys(5), keys(6), ()))
    for message, written in ((delta, FIRST_DELTA), (snapshot, FIRST_SNAPSHOT)):
        assert decode(bytes.fromhex(written)) == message
        assert encode(message).hex() == written


def keys(*numbers: int) -> Keys:
    return tuple(map(PrefixKey, numbers))


@pytest.mark.parametrize("data", [b"\x02", b"\x02\x01" + 200 * b"\0", b"\x00", b"\xff" * 20])
def test_any_other_first_byte_is_another_version(data: bytes) -> None:
    with pytest.raises(UnknownVersion, match="upgrade"):
        decode(data)


def test_nothing_at_all_is_no_version() -> None:
    with pytest.raises(DecodeError) as caught:
        decode(b"")
    assert not isinstance(caught.value, UnknownVersion)


def later(seq: int) -> bytes:
    return b"\x02" + encode(RegistryMessage(MessageKind.DELTA, 256, 1, seq, LoadReport()))[1:]


async def test_a_later_version_is_counted_and_passed_over(redis_server: RedisServer) -> None:
    """This holds for stream and snapshot. The pod is treated as if it published nothing; others are not affected."""
    known, newer = FakeEngine(redis_server, "known", epoch=1), FakeEngine(redis_server, "newer", epoch=1)
    with redis.Redis.from_url(redis_server.url) as client:
        client.set(snapshot_key(MODEL, newer.pod), later(1), ex=60)
        async with known.running(), Gateway(redis_server).following(known, newer) as gateway:
            known.change(dict.fromkeys(range(10), Tier.GPU))
            await gateway.wait_equal(known)
            await wait_until(lambda: gateway.reader.status().unknown == 1)
            for seq in range(2, 7):
                client.xadd(stream_key(MODEL), {"p": newer.pod, "d": later(seq)})
            await wait_until(lambda: gateway.reader.status().unknown >= 6)
            known.change({77: Tier.GPU})
            await gateway.wait_equal(known)
            assert await gateway.reader.wait_warm(5.0)
            assert gateway.reader.reports(known.pod)
            assert not gateway.reader.reports(newer.pod)
            status = gateway.reader.status()
            assert (status.refused, status.resyncs, status.last_error) == (0, 0, None)


async def test_fetch_costs_are_beside_the_message_so_that_the_version_before_reads_it(
    redis_server: RedisServer,
) -> None:
    """Readers find fields by name, so they ignore further fields. The message itself is the same to the byte."""
    tiered, plain = FakeEngine(redis_server, "tiered", epoch=1), FakeEngine(redis_server, "plain", epoch=1)
    tiered.fetch = FetchCosts(FetchCost(0.0, 3e-6), FetchCost(0.002, 4e-5))
    with redis.Redis.from_url(redis_server.url) as client:
        async with tiered.running(), plain.running(), Gateway(redis_server).following(tiered, plain) as gateway:
            for engine in (tiered, plain):
                engine.change({1: Tier.HOST})
                await gateway.wait_equal(engine)
            await wait_until(lambda: gateway.loads[tiered.pod].fetch == tiered.fetch)
            assert gateway.loads[plain.pod].fetch == FetchCosts()
            entries = [dict(entry) for _, entry in client.xrange(stream_key(MODEL))]
            for entry in entries:
                assert list(entry)[:2] == [b"p", b"d"]
                assert len(entry) == (3 if entry[b"p"] == b"tiered" else 2)
                assert decode(entry[b"d"]).load.fetch == FetchCosts()
            broken = {**entries[-1], "p": tiered.pod, "f": b"\x01\x00\x09\x00"}
            client.xadd(stream_key(MODEL), broken)
            # The replay after the snapshot may refuse the entry once more.
            await wait_until(lambda: gateway.reader.status().refused >= 1)
            await gateway.wait_equal(tiered)


async def test_an_engine_that_is_upgraded_first_is_no_reason_to_mistrust_the_registry(
    redis_server: RedisServer,
) -> None:
    engine = FakeEngine(redis_server, "a", epoch=1)
    with redis.Redis.from_url(redis_server.url) as client:
        async with Gateway(redis_server).following(engine) as gateway:
            async with engine.running():
                engine.change({1: Tier.GPU})
                await gateway.wait_equal(engine)
            client.xadd(stream_key(MODEL), {"p": engine.pod, "d": later(1)})
            await wait_until(lambda: not gateway.held(engine.pod))
            assert not gateway.reader.reports(engine.pod)
            assert not gateway.reader.expired, "the pod still publishes, although in a later version"
            back = FakeEngine(redis_server, "a", epoch=2)
            async with back.running():  # the upgrade is rolled back
                back.change({2: Tier.GPU})
                await gateway.wait_equal(back)
