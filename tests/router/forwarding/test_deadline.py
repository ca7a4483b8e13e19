"""`Deadline` ends the same blocks as `asyncio.timeout` at the same moment, and lets the same exceptions through."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable

import pytest

from router.forwarding.relay import Deadline

Set = Callable[[float], None]


@contextlib.asynccontextmanager
async def theirs() -> AsyncIterator[Set]:
    """Yield asyncio's own deadline."""
    async with asyncio.timeout(None) as limit:
        yield limit.reschedule


@contextlib.asynccontextmanager
async def ours() -> AsyncIterator[Set]:
    """Yield the gateway's deadline."""
    with Deadline(asyncio.get_running_loop()) as limit:
        yield limit.at


async def run(make: Callable[[], contextlib.AbstractAsyncContextManager[Set]], seed: int) -> tuple[object, ...]:
    """Run a block with random waits, deadlines and cancellations. Return how and when it ended, and how many
    cancellations are left."""
    rng, loop = random.Random(seed), asyncio.get_running_loop()
    began_s, steps, is_over = loop.time(), 0, False
    left = 0

    async def work() -> None:
        nonlocal steps, left, is_over
        task = asyncio.current_task()
        assert task is not None
        try:
            async with make() as at:
                for _ in range(rng.randrange(1, 5)):
                    if rng.random() < 0.7 and not is_over:  # asyncio may refuse it after the deadline
                        at(loop.time() + rng.choice((0.3, 1.3, 2.3, 3.3)))
                    swallows = rng.random() < 0.15
                    try:
                        await asyncio.sleep(rng.choice((0.0, 0.5, 1.0, 2.0, 2.5)))
                    except asyncio.CancelledError:
                        if not swallows:
                            raise
                        is_over = True
                    steps += 1
                if rng.random() < 0.2:
                    raise KeyError("the block's own")
        finally:
            left = task.cancelling()

    task = asyncio.create_task(work())
    if rng.random() < 0.5:
        loop.call_later(rng.choice((0.1, 1.1, 1.6, 2.1, 3.1)), task.cancel)
    (ended,) = await asyncio.gather(task, return_exceptions=True)
    return type(ended).__name__, round(loop.time() - began_s, 6), steps, left


@pytest.mark.looptime
async def test_it_ends_as_asyncios_timeout_does() -> None:
    kinds = set()
    for seed in range(600):
        found = await run(ours, seed)
        assert found == await run(theirs, seed), seed
        kinds.add(found[0])
    assert kinds == {"NoneType", "TimeoutError", "CancelledError", "KeyError"}


@pytest.mark.looptime
async def test_nothing_is_left_behind() -> None:
    """A block that ends in time is not cancelled later."""
    loop = asyncio.get_running_loop()
    with Deadline(loop) as limit:
        limit.at(loop.time() + 1.0)
        await asyncio.sleep(0.5)
    await asyncio.sleep(10.0)
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()
