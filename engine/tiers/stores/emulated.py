"""Copies of emulated devices: nothing moves, but a copy takes as long as its bytes would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.tiers.copies.base import BlockRun, Direction, EndedJob, Moved, RunningJob


class Timers(Protocol):
    """The part of an event loop that is used here. Its clock may be virtual."""

    def time(self) -> float:
        """Return the time in seconds, which only grows."""
        ...

    def call_at(self, when: float, callback: Callable[[], object], /) -> object:
        """Call `callback` at that time."""
        ...


class EmulatedCopies:
    """A `CopyEngine` in which each direction moves `bytes_per_s`, one job after the other."""

    def __init__(
        self, timers: Timers, *, pool_blocks: int, host_slots: int, block_bytes: int, bytes_per_s: float
    ) -> None:
        self.pool_blocks, self.host_slots, self.block_bytes = pool_blocks, host_slots, block_bytes
        self.bytes_per_s = bytes_per_s
        self._timers = timers
        self._free_at_s = dict.fromkeys(Direction, 0.0)
        self._on_end: Callable[[], None] | None = None

    def tell(self, on_end: Callable[[], None] | None) -> None:
        """Call `on_end` whenever a job has ended; None: call nothing."""
        self._on_end = on_end

    def start(self, job: Sequence[BlockRun]) -> RunningJob:
        """See `CopyEngine.start`."""
        return self._moving(job, sum(run.blocks for run in job))

    def _moving(self, job: Sequence[BlockRun], blocks: int, errors: Sequence[str | None] = ()) -> RunningJob:
        """Return a job that takes the time of `blocks` blocks."""
        direction = job[0].direction
        begins_s = max(self._timers.time(), self._free_at_s[direction]) if blocks else self._timers.time()
        seconds = blocks * self.block_bytes / self.bytes_per_s
        if blocks:
            self._free_at_s[direction] = begins_s + seconds
        self._timers.call_at(begins_s + seconds, self._ended)
        return _Emulated(self._timers, begins_s + seconds, EndedJob(Moved(blocks, seconds), errors))

    def close(self) -> None:
        """Nothing to free."""
        self._on_end = None

    def _ended(self) -> None:
        if self._on_end is not None:
            self._on_end()


@dataclass(frozen=True, slots=True)
class _Emulated:
    timers: Timers
    ends_s: float
    outcome: EndedJob

    def ended(self) -> EndedJob | None:
        """See `RunningJob.ended`."""
        return self.outcome if self.timers.time() >= self.ends_s else None
