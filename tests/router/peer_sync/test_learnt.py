"""What a gateway has learnt from answers outlives it: a new gateway starts from a record in Redis."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from engine.contract.events import DecodeError
from engine.contract.redis_keys import LEARNT_KEY
from router.choosing.learnt_values import LearntValues
from router.peer_sync.keyed_values import KeyedValues
from router.registry.cache_estimate import Taken
from router.registry.learnt import Learnt, LearntCapacity, LearntTokens, decode_learnt, encode_learnt
from router.registry.speculative_entries import SpeculativeEntries
from router.views.pod_state import PodState
from router.views.speeds import LearntFactor, LearntSpeed, Speeds
from router.views.types import PodId
from tests.redis_server import RedisServer

above = st.floats(1e-6, 1e12)
logs = st.floats(-16, 16)
pods = st.text(min_size=1, max_size=8).map(PodId)
speeds = st.builds(
    LearntSpeed,
    logs,
    st.floats(1e-6, 100),
    above,
    st.integers(0, 10**12),
    st.dictionaries(st.integers(0, 40), st.tuples(above, st.floats(0, 1e12), logs), max_size=4),
)
records = st.builds(
    Learnt,
    st.none() | st.builds(LearntTokens, above, above, st.floats(0, 1e12)),
    st.dictionaries(st.sampled_from(("vllm", "sglang")), speeds, max_size=2),
    st.dictionaries(pods, st.builds(LearntFactor, logs, st.floats(0, 1e12), logs), max_size=3),
    st.dictionaries(pods, st.builds(LearntCapacity, above, st.none() | st.integers(1, 10**12)), max_size=3),
)
RECORD = Learnt(
    LearntTokens(9e3, 4e3, 7.0),
    {"vllm": LearntSpeed(0.5, 0.25, 20.0, 30, {11: (12.0, 1500.0, -1.0)})},
    {PodId("a"): LearntFactor(0.7, 9.0, 0.6)},
    {PodId("a"): LearntCapacity(20_000.0, 20_480), PodId("b"): LearntCapacity(5_000.0, None)},
)


@given(records, st.floats(0, 1e12))
@settings(max_examples=50, deadline=None)
def test_a_record_is_read_as_it_was_written(learnt: Learnt, written_s: float) -> None:
    assert decode_learnt(encode_learnt(learnt, written_s)) == (learnt, written_s)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


@given(st.sampled_from(("version", "written_s", "tokens", "speeds", "factors", "rooms")), json_values)
@settings(max_examples=150, deadline=None)
def test_what_is_no_record_is_refused_and_breaks_nothing(name: str, value: object) -> None:
    fields = json.loads(encode_learnt(RECORD, 1.0))
    fields[name] = value
    try:
        learnt, written_s = decode_learnt(json.dumps(fields).encode())
    except DecodeError:
        return
    assert decode_learnt(encode_learnt(learnt, written_s)) == (learnt, written_s)


@given(records, st.lists(st.tuples(st.sampled_from([0, 1, 900, 10**6]), st.floats(0, 1e3)), max_size=6))
@example(Learnt(speeds={"vllm": LearntSpeed(-1, 1, 50, 2, {0: (1e-3, 1e12, 0), 40: (50, 40, 12)})}), [(1, 0.1)] * 6)
@settings(max_examples=200, deadline=None)
def test_a_gateway_works_with_any_record_that_it_reads(learnt: Learnt, served: list[tuple[int, float]]) -> None:
    learnt, _ = decode_learnt(encode_learnt(learnt, 1.0))
    known = Speeds()
    known.expect("m", learnt.speeds, learnt.factors)
    now_s = 0.0
    for engine in ("vllm", "sglang"):
        state = PodState(known.of("m", engine))
        for factor in learnt.factors.values():
            state.speed.begin_with(factor)
        for tokens, seconds in served:
            now_s += 10.0
            state.sent("r", prompt_tokens=900, uncached_tokens=tokens, output_tokens=1, now_s=now_s)
            assert state.load(now_s).cost.token_s > 0
            assert state.row(now_s)
            now_s += seconds
            state.first_token("r", now_s=now_s)
            state.finished("r", now_s=now_s)
    for capacity in learnt.capacities.values():
        cache = SpeculativeEntries(100)
        cache.expect_capacity(capacity.capacity_tokens, capacity.told_tokens)
        for told in (None, 1, 10**9, 1000):
            cache.take(Taken(500, 64.0, told, 16), 4, now_s)
            assert cache.free_tokens() >= 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("speeds", {"vllm": [0.5, 1e12, 20.0, 30, []]}),
        ("speeds", {"vllm": [50, 0.25, 20.0, 30, []]}),
        ("speeds", {"vllm": [0.5, 0.25, 20.0, 30, [[11, 12.0, 1500.0, -50]]]}),
        ("rooms", {"a": [100.0, 0.5]}),
    ],
)
def test_absurd_numbers_are_refused(name: str, value: object) -> None:
    fields = json.loads(encode_learnt(RECORD, 1.0))
    with pytest.raises(DecodeError):
        decode_learnt(json.dumps({**fields, name: value}).encode())


@given(st.binary(max_size=64))
@settings(max_examples=50, deadline=None)
def test_bytes_that_are_no_record_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_learnt(data)


class Source(LearntValues):
    """The knowledge of one gateway."""

    def __init__(self, **learnt: Learnt) -> None:
        self.known: dict[str, Learnt | None] = {**learnt}
        self.expected: dict[str, Learnt] = {}

    def own(self, name: str, now_s: float) -> Iterable[tuple[str, Learnt]]:
        assert name == LEARNT_KEY
        return [(model, learnt) for model, learnt in self.known.items() if learnt is not None]

    def use(self, name: str, field: str, value: Learnt, written_s: float) -> None:
        self.expected[field] = value


async def loaded(redis: RedisServer) -> dict[str, Learnt]:
    """Return what a gateway starts with."""
    source = Source()
    sync = KeyedValues(redis.url, source)
    await sync.load()
    await sync.close()
    return source.expected


async def test_a_gateway_begins_with_what_the_last_one_knew_of_each_model(redis_server: RedisServer) -> None:
    assert await loaded(redis_server) == {}
    first, second = Source(m=RECORD, n=RECORD), Source(m=RECORD, new=Learnt())
    second.known["nothing"] = None
    for source in (first, second):
        await KeyedValues(redis_server.url, source).close()
    newer = replace(RECORD, tokens=LearntTokens(1.0, 2.0, 3.0))
    second.known["m"] = newer
    await KeyedValues(redis_server.url, second).close()
    assert await loaded(redis_server) == {"m": newer, "n": RECORD, "new": Learnt()}


async def test_what_is_learnt_is_written_while_the_gateway_runs(redis_server: RedisServer) -> None:
    source = Source(m=RECORD)
    sync = KeyedValues(redis_server.url, source)
    running = asyncio.create_task(sync.run())
    async with Redis.from_url(redis_server.url) as redis:
        for _ in range(600):
            if await redis.hget(LEARNT_KEY, "m") is not None:
                break
            await asyncio.sleep(0.05)
        assert 0 < await redis.ttl(LEARNT_KEY) <= LearntValues.kept_s
    running.cancel()
    await asyncio.wait((running,))
    await sync.close()


async def test_old_and_broken_records_are_passed_over(redis_server: RedisServer) -> None:
    async with Redis.from_url(redis_server.url) as redis:
        now_s = (await redis.time())[0]
        records: dict[Any, Any] = {
            "old": encode_learnt(RECORD, now_s - LearntValues.kept_s - 60),
            "ahead": encode_learnt(RECORD, now_s + LearntValues.kept_s + 60),
            "broken": b"{",
            b"\xff": encode_learnt(RECORD, now_s),
            "m": encode_learnt(RECORD, now_s),
        }
        await redis.hset(LEARNT_KEY, mapping=records)
        found = await loaded(redis_server)
        assert set(await redis.hkeys(LEARNT_KEY)) == {b"broken", b"\xff", b"m"}  # old records are removed
    assert found.pop("m") == RECORD
    assert list(found) == ["�"]  # this is no model's name, so nobody uses the record


async def test_without_redis_a_gateway_learns_by_itself(unused_tcp_port: int) -> None:
    source = Source(m=RECORD)
    sync = KeyedValues(f"redis://127.0.0.1:{unused_tcp_port}", source)
    async with asyncio.timeout(30):
        await sync.load()
        await sync.close()
    assert source.expected == {}
