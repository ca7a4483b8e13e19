from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.engine.common.otel.collector import Collector, running_collector


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the OTEL_* variables of the environment in which the tests run."""
    for name in os.environ:
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def collector_process() -> Iterator[Collector]:
    with running_collector() as collector:
        yield collector


@pytest.fixture
def collector(collector_process: Collector) -> Iterator[Collector]:
    """A collector that accepts everything until a test sets another mode."""
    collector_process.mode("take")
    yield collector_process
    collector_process.mode("take")  # senders that still wait get an answer
