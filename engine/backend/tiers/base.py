"""What crosses the seam between deciding about copies and making them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol


class Direction(Enum):
    """Which way a copy goes. Each way has a queue, a stream and a measured rate of its own."""

    DEMOTE = "demote"
    """From a block of the pool to a slot of the host tier."""
    PROMOTE = "promote"
    """From a slot of the host tier to a block of the pool."""


class BlockPair(NamedTuple):
    """One whole KV block, all layers, from place to place."""

    source: int
    """Pool block of a demotion, host slot of a promotion."""
    target: int
    """Host slot of a demotion, pool block of a promotion."""


class CopyError(Exception):
    """A copy could not be made; what its target holds is undefined."""


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Neighbouring blocks that move in one piece: source + i to target + i for i in 0 .. blocks - 1."""

    direction: Direction
    source: int
    target: int
    blocks: int

    @property
    def pairs(self) -> tuple[BlockPair, ...]:
        """The blocks one by one."""
        return tuple(BlockPair(self.source + i, self.target + i) for i in range(self.blocks))


@dataclass(frozen=True, slots=True)
class FinishedCopy:
    """The end of a copy: from here on its blocks and slots are no longer fenced."""

    copy_id: int
    direction: Direction
    done: Sequence[BlockPair]
    """Pairs whose target now holds what its source held, in the order of the request."""
    dropped: Sequence[BlockPair] = ()
    """Pairs that were cancelled or failed: their targets hold nothing of use."""
    error: str | None = None
    """Why a part failed; None where none did."""


class RunningCopy(Protocol):
    """A run that an engine has started."""

    def elapsed_s(self) -> float | None:
        """Seconds that the bytes took to move, once all have; None before. Never waits. Raises CopyError."""


class CopyEngine(Protocol):
    """Moves runs of blocks. Runs of one direction may finish in any order, and beside those of the other one."""

    block_bytes: int
    pool_blocks: int
    host_slots: int

    def start(self, run: BlockRun) -> RunningCopy:
        """Begin to copy; returns before it ends. Raises CopyError where it cannot begin."""
