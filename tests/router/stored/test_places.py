"""Which pods have which conversations: a bounded memory that forgets, backed by Redis."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.common.redis_client import connect
from engine.contract.redis_keys import place_key
from router.stored import places
from router.stored.places import PLACE_TTL_S, Place, Places
from tests.redis_server import RedisServer

pytestmark = pytest.mark.realtime  # a real Redis

NAMES = st.sampled_from("abcdef")


@pytest.fixture
def no_blocking_calls() -> None:
    """Allow blocking calls: the Redis server of a test is started while the loop runs."""


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def few_places(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(places, "MAX_PLACES", 3)
        yield


@settings(max_examples=60)
@given(st.lists(st.tuples(NAMES, st.integers(0, 9)) | st.floats(0, PLACE_TTL_S), max_size=25))
def test_the_latest_are_known_until_they_end(steps: list[tuple[str, int] | float]) -> None:
    """Compare with a dict of all stored places and the times when they expire."""
    clock = Clock()
    memory, model = Places(clock), dict[str, tuple[Place, float]]()
    for step in steps:
        if isinstance(step, float):
            clock.now_s += step
        else:
            place = Place(f"pod{step[1]}", "m", "t")
            memory.put(step[0], place)
            model.pop(step[0], None)
            model[step[0]] = (place, clock.now_s + PLACE_TTL_S)
        kept = dict(list(model.items())[-3:])
        assert len(memory) <= 3
        for name in "abcdef":
            told = kept.get(name)
            assert memory.known(name) == (told[0] if told and clock.now_s < told[1] else None)
        model = {name: put for name, put in kept.items() if clock.now_s < put[1]}


async def test_others_hear_of_it_through_redis_and_nonsense_is_nothing(redis_server: RedisServer) -> None:
    async with connect(redis_server.url) as redis, contextlib.AsyncExitStack() as running:
        one, two = Places(Clock(), redis), Places(Clock(), redis)
        task = asyncio.create_task(one.run())
        running.callback(task.cancel)
        place = Place("a", "m", "t", 70)
        for i in range(places.WRITTEN_AT_ONCE * 2):
            one.share(f"resp_{i}", place)
        deadline_s = asyncio.get_running_loop().time() + 20
        while await two.find(f"resp_{places.WRITTEN_AT_ONCE * 2 - 1}") is None:
            assert asyncio.get_running_loop().time() < deadline_s
            await asyncio.sleep(0.01)
        assert await two.find("resp_0") == place
        assert 0 < await redis.ttl(place_key("resp_0")) <= PLACE_TTL_S
        one.forget("resp_1")
        one.forget("of_nobody")
        assert one.known("resp_1") is None
        while await Places(Clock(), redis).find("resp_1") is not None:
            assert asyncio.get_running_loop().time() < deadline_s
            await asyncio.sleep(0.01)
        assert await Places(Clock(), redis).find("of_nobody") is None
        for i, nonsense in enumerate((b"", b"7", b"{", b'{"pod":1,"model":"m","tenant":"t"}', b'{"pod":"a","x":1}')):
            await redis.set(place_key(f"bad{i}"), nonsense)
            assert await two.find(f"bad{i}") is None


async def test_without_redis_what_is_known_here_is_known() -> None:
    async with connect("redis://127.0.0.1:1") as redis:
        memory = Places(Clock(), redis)
        memory.share("resp_1", Place("a", "m", "t"))
        assert await memory.find("resp_1") == Place("a", "m", "t")
        assert await memory.find("resp_2") is None
