"""Copies on separate threads, for memory and files that block the thread that moves the bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from engine.tiers.copies.base import BlockMover, BlockRun, CopyError, Direction, EndedJob, Moved, RunningJob

CLOSE_S = 1.0
"""Seconds that the jobs under way may take to end when the engine stops."""


class ThreadedCopies:
    """A `CopyEngine` over a mover, with a thread for each direction that does one job after the other.

    `BlockCopier` bounds the jobs that wait. A thread that hangs in a copy does not stop the process from ending. All
    that these threads do, except moving bytes, needs the interpreter's lock, and a step may have to wait for it. So
    they are woken, and report, only once for a job of many runs.
    """

    def __init__(self, mover: BlockMover, name: str) -> None:
        self.block_bytes, self.pool_blocks, self.host_slots = mover.block_bytes, mover.pool_blocks, mover.host_slots
        self._mover = mover
        self._on_end: Callable[[], None] | None = None
        self._queues: dict[Direction, SimpleQueue[_Job | None]] = {}
        self._threads = []
        self._is_closed = False
        for way in Direction:
            queue = self._queues[way] = SimpleQueue()
            self._threads.append(
                threading.Thread(target=self._work, args=(queue,), name=f"{name}-{way.value}", daemon=True)
            )
            self._threads[-1].start()

    def tell(self, on_end: Callable[[], None] | None) -> None:
        """Call `on_end` on one of the copying threads whenever a job has ended; None: call nothing."""
        self._on_end = on_end

    def start(self, job: Sequence[BlockRun]) -> RunningJob:
        """See `CopyEngine.start`. Raises CopyError after `close`."""
        if self._is_closed:
            raise CopyError("the engine is stopping")
        begun = _Job(job)
        self._queues[job[0].direction].put(begun)
        return begun

    def close(self) -> None:
        """Begin no further job, and wait at most `CLOSE_S` seconds for those under way."""
        self._on_end = None
        self._is_closed = True
        for queue in self._queues.values():
            queue.put(None)
        until_s = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _work(self, queue: SimpleQueue[_Job | None]) -> None:
        while (job := queue.get()) is not None and not self._is_closed:
            job.outcome = self._do(job.runs)
            if (on_end := self._on_end) is not None:
                on_end()

    def _do(self, runs: Sequence[BlockRun]) -> EndedJob:
        blocks, seconds = 0, 0.0
        errors: list[str | None] = []
        for run in runs:
            try:
                moved = self._mover.move(run)
            except CopyError as error:
                errors.append(str(error))
            except Exception as error:  # any error of a copy is a miss, and must not end this thread
                errors.append(f"{type(error).__name__}: {error}")
            else:
                errors.append(None)
                blocks += moved.blocks
                seconds += moved.seconds
        return EndedJob(Moved(blocks, seconds), errors)


@dataclass(slots=True, eq=False)
class _Job:
    runs: Sequence[BlockRun]
    outcome: EndedJob | None = None
    """Set once, by the copying thread."""

    def ended(self) -> EndedJob | None:
        """See `RunningJob.ended`."""
        return self.outcome
