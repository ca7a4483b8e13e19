"""The bounded pool of text threads."""

from __future__ import annotations

import asyncio
import threading

import pytest

from engine.contract.errors import TooManyRequests
from engine.server.service import TextWorkers
from tests.engine.server.conftest import wait_until


async def test_more_calls_than_may_wait_are_refused_until_threads_are_done() -> None:
    """If a caller has left, its call counts while a thread works on it, but not if no thread has begun it."""
    workers, release, begun = TextWorkers(1, max_pending=2), threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        assert release.wait(10)
        return "done"

    first = asyncio.ensure_future(workers.run(work))
    await wait_until(begun.is_set)
    second = asyncio.ensure_future(workers.run(work))
    await asyncio.sleep(0)
    with pytest.raises(TooManyRequests):
        await workers.run(work)
    first.cancel()
    await asyncio.wait([first])
    with pytest.raises(TooManyRequests):
        await workers.run(work)
    second.cancel()
    await asyncio.wait([second])
    await asyncio.sleep(0.01)
    third = asyncio.ensure_future(workers.run(work))
    release.set()
    assert await third == "done"
    workers.close()


async def test_an_error_of_the_call_is_the_callers() -> None:
    workers = TextWorkers(1, max_pending=1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await workers.run(lambda: 1 // 0)
        await wait_until(lambda: workers._pending == 0)
    workers.close()
