"""What the garbage collector walks and finds in a process that keeps it quiet, and whether its settings are restored.

`test_collector.py` runs this file in a process of its own.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import deque
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.common import collector
from engine.common.collector import quiet_collector


class Link:
    """One object of a cycle."""

    __slots__ = ("__weakref__", "next")

    def __init__(self) -> None:
        self.next: Link = self


class Request:
    """Makes a cycle of `links` objects, like a request's task, frames and exceptions. `alive` counts live cycles."""

    alive = 0

    def __init__(self, links: int = 4) -> None:
        self.first = last = Link()
        for _ in range(links - 1):
            last.next = last = Link()
        last.next = self.first
        type(self).alive += 1
        weakref.finalize(self.first, self.gone)

    @classmethod
    def gone(cls) -> None:
        cls.alive -= 1


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that every test restores the collector's settings."""
    monkeypatch.setattr(collector, "gc", gc)
    gc.unfreeze()
    thresholds = gc.get_threshold()
    Request.alive = 0
    gc.collect()
    yield
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert Request.alive == 0


def never() -> bool:
    return False


def always() -> bool:
    return True


def walked() -> int:
    """Return the number of objects that a collection of the oldest generation walks."""
    return len(gc.get_objects())


@settings(max_examples=10)
@given(links=st.integers(1, 20), window=st.integers(0, 3_000))
def test_cycles_are_found_in_a_process_that_is_never_idle(links: int, window: int) -> None:
    """`window` requests are in progress at any time. The older ones are in old generations when they end."""

    async def main() -> int:
        most, under_way = 0, deque[Request]()
        async with quiet_collector(never):
            for _ in range(200_000 // links):
                under_way.append(Request(links))
                if len(under_way) > window:
                    under_way.popleft()
                most = max(most, Request.alive)
        return most

    with patch.object(collector, "YOUNG", 200):  # so that many collections happen during the requests
        most = asyncio.run(main())
    # The oldest generation is collected after this many new objects, if that generation has grown by a quarter.
    objects = 200 * (5 + 2) * (10 + 2)
    assert most <= 1.5 * window + objects / links


async def test_short_cycles_do_not_outlive_the_youngest_generation() -> None:
    async with quiet_collector(never):
        most = 0
        for _ in range(50_000):
            Request()
            most = max(most, Request.alive)
    assert most <= 2 * collector.YOUNG / 4


async def test_what_exists_at_the_start_is_not_walked() -> None:
    state = [[i] for i in range(100_000)]
    before = walked()
    async with quiet_collector(never):
        assert walked() < before - len(state)
        assert gc.get_freeze_count() > len(state)
        found = []
        gc.callbacks.append(lambda phase, about: found.append((phase, about["collected"])))
        try:
            garbage = Request(3)
            del garbage
            gc.collect()
        finally:
            gc.callbacks.pop()
        assert found[0][0] == "start"
        assert found[1][1] >= 3
    del state


async def old_garbage() -> None:
    """The cycles are in the oldest generation when they become garbage."""
    requests = [Request() for _ in range(1_000)]
    gc.collect(0)
    gc.collect(1)
    del requests
    assert Request.alive == 1_000


@pytest.mark.looptime
async def test_an_idle_process_collects_its_oldest_generation() -> None:
    async with quiet_collector(always):
        await old_garbage()
        await asyncio.sleep(1.5 * collector.LOOK_EVERY_S)
        assert Request.alive == 0


@pytest.mark.looptime
async def test_a_busy_process_waits_until_there_is_reason_to() -> None:
    is_idle = False
    async with quiet_collector(lambda: is_idle):
        await old_garbage()
        await asyncio.sleep(100 * collector.LOOK_EVERY_S)
        assert Request.alive == 1_000
        is_idle = True
        await asyncio.sleep(1.5 * collector.LOOK_EVERY_S)
        assert Request.alive == 0


@pytest.mark.looptime
async def test_grown_state_is_frozen_when_idle_and_its_cycles_are_found_at_the_next_time() -> None:
    async with quiet_collector(always):
        small = walked()
        state = [Request(2) for _ in range(collector.GROWN)]
        frozen = gc.get_freeze_count()
        await asyncio.sleep((collector.IDLE_LOOKS - 0.5) * collector.LOOK_EVERY_S)
        assert gc.get_freeze_count() <= frozen, "a process that is idle for a short time does not freeze"
        await asyncio.sleep(collector.LOOK_EVERY_S)
        assert gc.get_freeze_count() >= frozen + len(state)
        assert walked() < small + len(state)
        del state
        gc.collect()
        assert Request.alive == collector.GROWN, "a collection does not find frozen cycles"
        more = [[i] for i in range(2 * collector.GROWN)]
        await asyncio.sleep((collector.IDLE_LOOKS + 1) * collector.LOOK_EVERY_S)
        assert Request.alive == 0
        assert gc.get_freeze_count() >= frozen + len(more)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, ValueError])
def test_however_the_block_ends_everything_is_as_before(error: type[BaseException]) -> None:
    """The fixture `as_before` checks that the settings are restored."""

    async def main() -> None:
        async with quiet_collector(always), quiet_collector(never):
            assert gc.get_threshold() == (collector.YOUNG, collector.MIDDLE, collector.OLDEST)
            raise error

    with pytest.raises(error):
        asyncio.run(main())


async def test_blocks_may_overlap() -> None:
    before, tasks = gc.get_threshold(), asyncio.all_tasks()
    first, second = quiet_collector(never), quiet_collector(never)
    await first.__aenter__()
    await second.__aenter__()
    await first.__aexit__(None, None, None)
    assert gc.get_threshold() != before
    assert gc.get_freeze_count() > 0
    await second.__aexit__(None, None, None)
    assert gc.get_threshold() == before
    assert asyncio.all_tasks() == tasks
