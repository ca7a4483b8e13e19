"""Long work takes turns: in order, one piece at a time, and others have the event loop in between."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.edge.turns import Turns


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_workers_take_turns_and_other_work_runs_between_two_pieces(workers: list[tuple[int, bool]]) -> None:
    """Each worker has some pieces, and waits for its turns as a task or by callbacks."""
    turns, log = Turns(), list[int | str]()

    async def task(number: int, pieces: int) -> None:
        for _ in range(pieces):
            await turns.turn()
            log.append(number)

    def callback(number: int, pieces: int) -> None:
        log.append(number)
        if pieces > 1:
            turns.add(lambda: callback(number, pieces - 1))

    async def main() -> None:
        tasks = []
        for number, (pieces, is_task) in enumerate(workers):
            if is_task:
                tasks.append(asyncio.create_task(task(number, pieces)))
            else:
                turns.add(lambda number=number, pieces=pieces: callback(number, pieces))  # type: ignore[misc]
        total = sum(pieces for pieces, _ in workers)
        while len([entry for entry in log if entry != "other"]) < total:
            log.append("other")
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)

    asyncio.run(main())
    pieces = [entry for entry in log if entry != "other"]
    assert sorted(pieces) == sorted(number for number, (count, _) in enumerate(workers) for _ in range(count))
    assert all("other" in (one, two) for one, two in itertools.pairwise(log))
    rounds = max(count for count, _ in workers)
    for number, (count, _) in enumerate(workers):
        last = max(i for i, entry in enumerate(pieces) if entry == number)
        assert last < sum(min(other, count + 1) for other, _ in workers), (number, rounds, pieces)


async def test_work_that_fails_stops_nobody_else() -> None:
    turns, done = Turns(), asyncio.Event()
    errors: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(str(context["exception"])))

    def fail() -> None:
        raise RuntimeError("broken")

    turns.add(fail)
    turns.add(done.set)
    await asyncio.wait_for(done.wait(), 5)
    assert errors == ["broken"]


async def test_a_waiter_that_leaves_gives_its_turn_away() -> None:
    turns = Turns()
    first, second = asyncio.create_task(turns.turn()), asyncio.create_task(turns.turn())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait_for(second, 5)
    await turns.turn()


async def test_others_have_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece takes 4 ms of a clock that only pieces move, so a pause of 4 ms follows each."""
    now_s = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    loop, pauses = asyncio.get_running_loop(), list[float]()
    later = loop.call_later

    def call_later(delay_s: float, *rest: Any) -> asyncio.TimerHandle:
        if delay_s > 1:  # the test's own deadline
            return later(delay_s, *rest)
        pauses.append(delay_s)
        return later(0, *rest)

    monkeypatch.setattr(loop, "call_later", call_later)
    turns, done = Turns(), asyncio.Event()

    def piece(left: int) -> None:
        nonlocal now_s
        now_s += 0.004
        if left:
            turns.add(lambda: piece(left - 1))
        else:
            done.set()

    turns.add(lambda: piece(5))
    await asyncio.wait_for(done.wait(), 5)
    assert pauses == pytest.approx([0.004] * 5)
