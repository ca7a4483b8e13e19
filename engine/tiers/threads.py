"""Copies on threads of their own: for engines whose `start` returns only when the bytes have moved."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue

from engine.backend.tiers.base import BlockRun, CopyEngine, CopyError, Direction, RunningCopy

CLOSE_S = 1.0
"""Seconds that the runs under way may take to end when the engine stops."""


class ThreadedCopies:
    """A `CopyEngine` over another one: a thread for each direction, which makes one run after the other.

    As many runs wait as `BlockCopier` has in flight. A thread that hangs in a copy does not keep a process from ending.
    """

    def __init__(self, engine: CopyEngine, name: str) -> None:
        self.block_bytes, self.pool_blocks, self.host_slots = engine.block_bytes, engine.pool_blocks, engine.host_slots
        self._engine = engine
        self._on_end: Callable[[], None] | None = None
        self._queues: dict[Direction, SimpleQueue[tuple[BlockRun, Future[float]] | None]] = {}
        self._threads = []
        self._is_closed = False
        for way in Direction:
            queue = self._queues[way] = SimpleQueue()
            self._threads.append(
                threading.Thread(target=self._work, args=(queue,), name=f"{name}-{way.value}", daemon=True)
            )
            self._threads[-1].start()

    def tell(self, on_end: Callable[[], None] | None) -> None:
        """Call this on a thread of the copies when a run has ended; None: call nothing."""
        self._on_end = on_end

    def start(self, run: BlockRun) -> RunningCopy:
        """See `CopyEngine.start`. Raises CopyError after `close`."""
        if self._is_closed:
            raise CopyError("the engine stops")
        moved: Future[float] = Future()
        self._queues[run.direction].put((run, moved))
        return _Moving(moved)

    def close(self) -> None:
        """Begin no further run, and wait `CLOSE_S` seconds at most for those under way."""
        self._on_end = None
        self._is_closed = True
        for queue in self._queues.values():
            queue.put(None)
        until_s = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _work(self, queue: SimpleQueue[tuple[BlockRun, Future[float]] | None]) -> None:
        while (job := queue.get()) is not None and not self._is_closed:
            run, moved = job
            try:
                moved.set_result(self._engine.start(run).elapsed_s() or 0.0)
            except Exception as error:  # raised again where the copy is asked for
                moved.set_exception(error)
            if (on_end := self._on_end) is not None:
                on_end()


@dataclass(frozen=True, slots=True)
class _Moving:
    moved: Future[float]

    def elapsed_s(self) -> float | None:
        """See `RunningCopy.elapsed_s`."""
        if not self.moved.done():
            return None
        try:
            return self.moved.result()
        except CopyError:
            raise
        except Exception as error:  # whatever a copy meets is a miss, and ends no step
            raise CopyError(f"{type(error).__name__}: {error}") from error
