"""Copies of emulated devices: nothing moves, and it takes as long as the bytes would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.backend.tiers.base import BlockRun, Direction, RunningCopy


class Timers(Protocol):
    """What is used of an event loop: its clock may be virtual."""

    def time(self) -> float:
        """Seconds that only grow."""
        ...

    def call_at(self, when: float, callback: Callable[[], object], /) -> object:
        """Call at that time."""
        ...


class EmulatedCopies:
    """A `CopyEngine` in which each direction moves `bytes_per_s`, one run after the other."""

    def __init__(
        self, timers: Timers, *, pool_blocks: int, host_slots: int, block_bytes: int, bytes_per_s: float
    ) -> None:
        self.pool_blocks, self.host_slots, self.block_bytes = pool_blocks, host_slots, block_bytes
        self.bytes_per_s = bytes_per_s
        self._timers = timers
        self._free_at_s = dict.fromkeys(Direction, 0.0)
        self._on_end: Callable[[], None] | None = None

    def tell(self, on_end: Callable[[], None] | None) -> None:
        """Call this when a run has ended; None: call nothing."""
        self._on_end = on_end

    def start(self, run: BlockRun) -> RunningCopy:
        """See `CopyEngine.start`."""
        begins_s = max(self._timers.time(), self._free_at_s[run.direction])
        seconds = run.blocks * self.block_bytes / self.bytes_per_s
        self._free_at_s[run.direction] = begins_s + seconds
        self._timers.call_at(begins_s + seconds, self._ended)
        return _Emulated(self._timers, begins_s + seconds, seconds)

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
    seconds: float

    def elapsed_s(self) -> float | None:
        """See `RunningCopy.elapsed_s`."""
        return self.seconds if self.timers.time() >= self.ends_s else None
