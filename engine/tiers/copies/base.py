"""The types shared by the code that decides about copies and the code that makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol


class Direction(Enum):
    """The direction of a copy. Each direction has its own queue, stream and measured rate."""

    DEMOTE = "demote"
    """From a block of the pool to a slot of the host tier."""
    PROMOTE = "promote"
    """From a slot of the host tier to a block of the pool."""


class BlockPair(NamedTuple):
    """The source and target of one whole KV block, with all its layers."""

    source: int
    """Pool block of a demotion, host slot of a promotion."""
    target: int
    """Host slot of a demotion, pool block of a promotion."""


class CopyError(Exception):
    """A copy failed; the content of its target is undefined."""


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Neighbouring blocks that move in one piece: source + i to target + i for i in 0 .. blocks - 1."""

    direction: Direction
    source: int
    target: int
    blocks: int

    @property
    def pairs(self) -> tuple[BlockPair, ...]:
        """The pairs of the single blocks."""
        return tuple(BlockPair(self.source + i, self.target + i) for i in range(self.blocks))


@dataclass(frozen=True, slots=True)
class FinishedCopy:
    """The end of a copy. Its blocks and slots are no longer fenced."""

    copy_id: int
    direction: Direction
    done: Sequence[BlockPair]
    """Pairs whose target now holds the source's content, in the order of the request."""
    dropped: Sequence[BlockPair] = ()
    """Pairs that were cancelled or failed: their targets hold nothing usable."""
    error: str | None = None
    """Why a part failed; None if none did."""


class Moved(NamedTuple):
    """A measurement of the speed of copies."""

    blocks: int
    """Number of blocks that moved; fewer than asked for if some were at the target already."""
    seconds: float


@dataclass(frozen=True, slots=True)
class EndedJob:
    """What became of the runs of a job."""

    moved: Moved
    errors: Sequence[str | None] = ()
    """For each run, why it failed; None if it did not. Empty if none failed."""


class RunningJob(Protocol):
    """A job that an engine has started."""

    def ended(self) -> EndedJob | None:
        """Return what became of the job's runs, None before the last one has ended. Never waits."""


class CopyEngine(Protocol):
    """Moves runs of blocks, a job of several at a time. Jobs of one direction may end in any order. Both directions run
    in parallel."""

    block_bytes: int
    pool_blocks: int
    host_slots: int

    def start(self, job: Sequence[BlockRun]) -> RunningJob:
        """Begin to move these runs of one direction, and return before they have moved. Raises CopyError if none can
        begin."""


class BlockMover(Protocol):
    """Moves runs of blocks on the calling thread."""

    block_bytes: int
    pool_blocks: int
    host_slots: int

    def move(self, run: BlockRun) -> Moved:
        """Move a run. Blocks until it has moved. Raises CopyError if any of its blocks has not."""
