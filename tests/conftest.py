"""What every test shares."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.internal.constants_ast import Constants

from engine.common import collector
from tests.redis_server import RedisServer, running_redis

# Machines are shared and noisy: no per-example deadline, and the same examples in every run.
settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# Hypothesis also draws constants that it reads in the source of imported modules. With them the examples of a test
# depend on what ran before it in the same process. No setting switches that off, and a backend of our own does not
# reach all draws, so this overrides a private attribute. `test_same_examples.py` fails if a version lacks it.
HypothesisProvider._local_constants = Constants()  # type: ignore[assignment, method-assign]


def pytest_configure() -> None:
    """Set up a process that runs tests.

    There are more such processes than cores, so torch and BLAS compute with one thread each. A second thread would wait
    at every barrier for the core of another process: on a busy machine that turns seconds into minutes.

    pytest-asyncio asks for the current loop before it sets its own. If none was ever set, asyncio makes one, which is
    never closed, and the ResourceWarning fails whichever test runs at the next garbage collection.

    A shell that runs `make test` in the background has SIGINT ignored. Every process that a test starts would inherit
    that, and no test could end it by SIGINT.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # read when the libraries are loaded
        os.environ.setdefault(name, "1")
    asyncio.set_event_loop(None)


class UnusedCollector:
    """Replaces `gc` for programs that a test runs in its own process: they change thresholds and collect nothing."""

    def __getattr__(self, name: str) -> Any:
        """Return the same attribute of `gc`."""
        return getattr(gc, name)

    def collect(self) -> None:
        """Collect nothing."""

    def freeze(self) -> None:
        """Freeze nothing."""

    def unfreeze(self) -> None:
        """Thaw nothing."""

    def get_objects(self, **_generation: int) -> list[object]:
        """Return nothing, so nothing seems to have grown."""
        return []


def pytest_collection_finish() -> None:
    """Freeze the imported modules: no collection walks them again, and no program that a test runs here thaws them.

    They have a million objects, which take half a second to walk, and a thousand tests run a program that collects.
    `tests/engine/common/collector_alone.py` and `tests/e2e/test_quiet_collector.py` test the collecting itself.
    """
    gc.collect()
    gc.freeze()
    setattr(collector, "gc", UnusedCollector())  # noqa: B010  # types do not allow it


def pytest_unconfigure() -> None:
    """Thaw everything: libraries report objects as leaked that the interpreter cannot free at its end."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of processes for `-n auto`: two more than there are cores.

    Many tests spend most of their time waiting for programs that start and for clocks of other processes. Meanwhile a
    core would be idle.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + 2


@pytest.fixture(autouse=True)
def same_draws(request: pytest.FixtureRequest) -> None:
    """Seed `random` by the test's name. The product draws from it, for example a seed for a request without one.

    Without this, a rare draw would make a test fail once in hundreds of runs, on somebody else's machine.
    """
    random.seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A real, empty Redis server of the test's own, which it may stop and start."""
    with running_redis() as server:
        yield server


async def wait_until(condition: Callable[[], bool], deadline_s: float = 30.0, what: str = "the condition") -> None:
    """Poll until `condition()` is true. Fails after `deadline_s`."""
    try:
        async with asyncio.timeout(deadline_s):
            while not condition():  # noqa: ASYNC110  # states of other processes raise no event here
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"{what} did not come within {deadline_s} s")
