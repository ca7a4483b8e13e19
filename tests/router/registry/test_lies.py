"""Engines and gateways that publish impossible values: one pod loses its report, and nothing else is affected."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.events import DecodeError, MessageKind, RegistryMessage, Tier, decode, encode
from engine.contract.load import LOAD_REPORT_BYTES, LoadReport, StepCost
from engine.contract.redis_keys import STREAM_DATA_FIELD, STREAM_POD_FIELD, snapshot_key, stream_key
from router.peer_sync import shares as share_values
from router.peer_sync.shares import decode_report, encode_report
from router.registry import stream_reader
from router.routing.shares import TrafficShares
from router.views.pod_state import PodState
from router.views.types import PodId
from tests.conftest import wait_until
from tests.redis_server import RedisServer
from tests.router.registry.ends import MODEL, FakeEngine, Gateway


@contextlib.contextmanager
def client_of(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as client:
        yield client


LIES = [
    encode(RegistryMessage(MessageKind.DELTA, 256, 1, 2, LoadReport(cost=StepCost(token_s=float("inf"))))),
    encode(RegistryMessage(MessageKind.DELTA, 256, 1, 2, LoadReport(cost=StepCost(base_s=float("nan"))))),
    b"",
    b"\xff" * 300,
]


@pytest.mark.parametrize("lie", LIES, ids=["infinite", "not a number", "empty", "noise"])
async def test_a_pod_that_lies_costs_itself_its_report_and_the_others_nothing(
    redis_server: RedisServer, lie: bytes
) -> None:
    liar, honest = FakeEngine(redis_server, "liar", epoch=1), FakeEngine(redis_server, "honest", epoch=1)
    async with liar.running(), honest.running(), Gateway(redis_server).following(liar, honest) as gateway:
        for engine in (liar, honest):
            engine.change(dict.fromkeys(range(10), Tier.GPU))
        await gateway.wait_equal(liar, honest)
        with client_of(redis_server) as client:
            client.xadd(stream_key(MODEL), {STREAM_POD_FIELD: b"liar", STREAM_DATA_FIELD: lie})
        await wait_until(lambda: gateway.reader.status().refused + gateway.reader.status().unknown > 0)
        honest.change({77: Tier.GPU})
        liar.change({78: Tier.GPU})
        await gateway.wait_equal(liar, honest)  # the liar's keys arrive with its next snapshot
        assert gateway.loads[PodId("honest")].running == 11


async def test_a_lie_in_the_place_of_a_snapshot_is_refused_too(redis_server: RedisServer) -> None:
    honest = FakeEngine(redis_server, "honest", epoch=1)
    ghost = FakeEngine(redis_server, "ghost", epoch=1)
    with client_of(redis_server) as client:
        client.set(snapshot_key(MODEL, "ghost"), LIES[0])
    async with honest.running(), Gateway(redis_server).following(honest, ghost) as gateway:
        honest.change({1: Tier.GPU})
        await gateway.wait_equal(honest)
        await wait_until(lambda: gateway.reader.status().refused > 0)
        await wait_until(lambda: gateway.reader.status().connected)  # when the read that met the lie has ended
        assert PodId("ghost") not in gateway.loads


async def test_snapshots_are_read_a_few_at_a_time(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_reader, "SNAPSHOTS_AT_A_TIME", 2)
    engines = [FakeEngine(redis_server, f"e{i}", epoch=1) for i in range(7)]
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine.running())
            engine.change(dict.fromkeys(range(10), Tier.GPU))
        gateway = await stack.enter_async_context(Gateway(redis_server).following(*engines))
        await gateway.wait_equal(*engines)


@settings(max_examples=300)
@given(st.binary(min_size=LOAD_REPORT_BYTES, max_size=LOAD_REPORT_BYTES), st.floats(0, 100), st.integers(0, 10**6))
def test_whatever_is_believed_of_a_load_can_be_looked_at(noise: bytes, later_s: float, tokens: int) -> None:
    """The second of the reports has plausible costs, because random bytes hardly ever pass the decoder as floats."""
    for report in (noise, noise[:-40] + struct.pack("<5d", *(abs(byte) / 256 for byte in noise[-5:]))):
        data = bytearray(encode(RegistryMessage(MessageKind.DELTA, 256, 1, 1, LoadReport())))
        data[24 : 24 + LOAD_REPORT_BYTES] = report
        try:
            load = decode(bytes(data)).load
        except DecodeError:
            continue
        state = PodState()
        state.sent("r", prompt_tokens=tokens, uncached_tokens=tokens, output_tokens=9, now_s=0.0)
        state.report(load, now_s=1.0)
        seen = state.load(1.0 + later_s)
        assert seen.in_flight >= 1
        state.first_token("r", now_s=2.0 + later_s)
        state.finished("r", now_s=3.0 + later_s)


numbers = st.integers(-3, 2**70) | st.floats() | st.text(max_size=5) | st.none() | st.booleans()
items = st.tuples(numbers, numbers, numbers) | st.lists(numbers, max_size=4)
reports = st.tuples(numbers, st.lists(items, max_size=4) | numbers, numbers, numbers) | st.lists(numbers, max_size=4)
plain = st.tuples(
    st.floats(0, 1e6),
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.none(), st.floats(0, 1e6)), max_size=4),
    st.floats(0, 1e10),
    st.floats(0, 1e6),
)


@given(st.binary(max_size=60) | (reports | plain).map(lambda value: json.dumps(value).encode()))
def test_any_share_report_is_read_or_refused(data: bytes) -> None:
    try:
        report, written_s = decode_report(data)
    except DecodeError:
        return
    shares = TrafficShares(half_life_s=60.0, limit=100, depth_strides=8)
    shares.merge("other", report, 1.0)
    shares.popular(0.01, 2.0)
    encode_report(report, written_s)


@given(plain)
def test_proper_share_reports_are_read(value: Any) -> None:
    report, _ = decode_report(json.dumps(value).encode())
    assert len(report.keys) == len(value[1])


@pytest.mark.parametrize(
    "data",
    [
        b"[1e999, [], 1, 0]",
        b"[1, [[1e999, null, 1]], 1, 0]",
        b"[1, [[-1, null, 1]], 1, 0]",
        b"[1, [[18446744073709551616, null, 1]], 1, 0]",
        b"[1, [], 1, 1e999]",
        b"[1, [], 1, -1]",
        b'[1, [], 1, "much"]',
        b"[1, [], 1, 0, 2]",
    ],
)
def test_absurd_share_reports_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_report(data)


def test_share_reports_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_values, "MAX_ITEMS", 2)
    decode_report(b"[1, [[1, null, 1], [2, 1, 1]], 1, 0]")
    with pytest.raises(DecodeError):
        decode_report(b"[1, [[1, null, 1], [2, 1, 1], [3, 1, 1]], 1, 0]")
