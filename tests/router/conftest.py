from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from blockbuster import BlockBuster, blockbuster_ctx

from router.reading import reader_process

HERE = Path(__file__).parent
IN_VIRTUAL_TIME = frozenset(
    HERE / name
    for name in (
        "edge",
        "reading",
        "choosing",
        "engines",
        "forwarding",
        "continuing",
        "stored",
        "endpoints",
        "startup",
    )
)
"""Folders whose tests run a whole gateway in one event loop."""
NEVER_BLOCK = IN_VIRTUAL_TIME | {HERE / "operators"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of these folders in virtual time, except those with the marker `realtime`.

    Gateway, engines and clients are tasks of one event loop, and another task can read at once what one task writes to
    a loopback socket. So time has to pass only while all of them wait. The virtual clock begins at the real time,
    because fixtures set timers by the real clock.
    """
    for item in items:
        if item.path.parent in IN_VIRTUAL_TIME and item.get_closest_marker("realtime") is None:
            item.add_marker(pytest.mark.looptime(start=time.monotonic))


@pytest.fixture(autouse=True)
def no_other_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In virtual time, heavy bodies are read in the event loop: the reader process would have no time at all."""
    if request.node.get_closest_marker("looptime") is not None:
        monkeypatch.setattr(reader_process, "HEAVY_US", math.inf)


@pytest.fixture(autouse=True)
def no_blocking_calls(request: pytest.FixtureRequest) -> Iterator[BlockBuster | None]:
    """Fail a test of the gateway if its event loop makes a blocking call."""
    if request.path.parent not in NEVER_BLOCK:
        yield None
        return
    with blockbuster_ctx() as blockbuster:
        yield blockbuster
