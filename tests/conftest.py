"""What every test shares."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.redis_server import RedisServer, running_redis

# Machines are shared and noisy: no per-example deadline, and the same examples in every run.
settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


def pytest_configure() -> None:
    """pytest-asyncio asks for the current loop before it sets its own; where none was ever set, asyncio makes one.

    It is never closed, and the ResourceWarning fails whichever test runs at the next garbage collection.
    """
    asyncio.set_event_loop(None)


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A real, empty Redis server of the test's own, which it may stop and start."""
    with running_redis() as server:
        yield server


async def wait_until(condition: Callable[[], bool], deadline_s: float = 10.0, what: str = "the condition") -> None:
    """Poll until `condition()`; fails after `deadline_s`."""
    try:
        async with asyncio.timeout(deadline_s):
            while not condition():  # noqa: ASYNC110  # states of other processes raise no event here
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"{what} did not come within {deadline_s} s")
