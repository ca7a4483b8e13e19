"""A device without a card: it computes on the CPU at once, and its memory and events follow a script."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from engine.backend.cuda.device import Event

DEADLINE_S = 30
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a card, kernels do not run on the CPU")


def plain(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    """Wrap a coroutine test so that it needs no plug-in, which a machine with a card may lack."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@dataclass
class CpuEvent:
    """An event that passes when it is recorded, unless it is held."""

    at_s: float
    held: threading.Event | None = None

    def wait(self) -> None:
        if self.held is not None and not self.held.wait(DEADLINE_S):
            raise TimeoutError("the test never let the device go on")

    def seconds_to(self, later: Event) -> float:
        assert isinstance(later, CpuEvent)
        return later.at_s - self.at_s


class CpuGraph:
    """Repeats the captured work on the captured addresses."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self._work()


@dataclass
class CpuDevice:
    """`Device` on the CPU: work has run when its launch returns, but `held` can delay its events."""

    free: int = 1 << 30
    total: int = 2 << 30
    graphs: list[CpuGraph] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)
    """All page-locked memory that was handed out."""
    held: threading.Event | None = None
    """Events recorded from now on pass when this is set; None: at once."""
    graph_bytes: int = 0
    """Bytes that each graph takes."""
    synchronized: int = 0
    peak: int = 0
    """Bytes that any work takes temporarily."""

    @property
    def torch(self) -> torch.device:
        return torch.device("cpu")

    @contextmanager
    def use(self) -> Iterator[None]:
        with torch.inference_mode():
            yield

    def pinned(self, size_bytes: int) -> Tensor:
        memory = torch.empty(size_bytes, dtype=torch.uint8)
        self.copies.append(memory)
        return memory

    def event(self) -> CpuEvent:
        return CpuEvent(time.perf_counter(), self.held)

    def capture(self, work: Callable[[], None]) -> CpuGraph:
        work()
        self.free -= self.graph_bytes
        self.graphs.append(CpuGraph(work))
        return self.graphs[-1]

    def synchronize(self) -> None:
        self.synchronized += 1

    def free_bytes(self) -> int:
        return self.free

    def total_bytes(self) -> int:
        return self.total

    def peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        return self.peak
