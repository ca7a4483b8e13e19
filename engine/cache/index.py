"""The interface of an index, which finds the cached blocks of a prompt's prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from engine.cache.sequence import CachedSequence


class IndexKind(StrEnum):
    """How shared prefixes are found."""

    HASH = "hash"
    """Whole blocks by chained digest."""
    RADIX = "radix"
    """Tokens, by a radix tree; the last tokens matched may be the first rows of a block."""
    OFF = "off"
    """Not at all."""


@dataclass(slots=True)
class Match:
    """The blocks that hold a sequence's prefix. Never changed, though not frozen (see `engine/sched/plan.py`)."""

    nodes: Sequence[int]
    """Whole blocks, in order."""
    source: int | None = None
    """A block that follows `nodes`, and whose first rows match too."""
    rows: int = 0
    """Number of rows of `source` that match."""


class PrefixIndex(Protocol):
    """Says which block holds which part of a chain. Blocks are numbers; `PrefixCache` handles references, eviction and
    keys.

    A block is in the index from its `add` to its `remove`, and so is its parent. Every indexed block is also in
    `IndexedBlocks`, where the index notes the block's digest and parent.
    """

    def count(self, sequence: CachedSequence, limit: int) -> int:
        """Return how many tokens `match` would find, at most `limit`. Cheap to call again for the same sequence."""
        ...

    def match(self, sequence: CachedSequence, limit: int) -> Match:
        """Return the longest prefix of the sequence that is indexed, of at most `limit` tokens."""
        ...

    def add(self, sequence: CachedSequence, first: int, stop: int) -> list[int]:
        """Index the sequence's full blocks first .. stop - 1, except those that equal an indexed block.

        Returns the indexed block for each: the equal one or the block itself. The list ends before the first
        block that can be neither matched nor indexed. The blocks before `first`, `sequence.nodes[:first]`, must be
        indexed.
        """
        ...

    def add_tail(self, sequence: CachedSequence, tokens: int) -> None:
        """Index the partly filled block in which the sequence's first `tokens` tokens end.

        All blocks before it are in `sequence.nodes`. An index of whole blocks does nothing.
        """
        ...

    def remove(self, blocks: Sequence[int]) -> None:
        """Remove these indexed blocks, in this order: a block goes after the blocks that follow it."""
        ...

    def clear(self) -> None:
        """Remove every block from the index."""
        ...

    def check(self) -> None:
        """Raise AssertionError if an invariant of this index does not hold. Visits everything: for tests."""
        ...


class NoIndex:
    """A `PrefixIndex` that finds nothing and holds nothing."""

    def count(self, sequence: CachedSequence, limit: int) -> int:
        """Return 0."""
        return 0

    def match(self, sequence: CachedSequence, limit: int) -> Match:
        """Return a match of no block."""
        return Match(())

    def add(self, sequence: CachedSequence, first: int, stop: int) -> list[int]:
        """Return no block."""
        return []

    def add_tail(self, sequence: CachedSequence, tokens: int) -> None:
        """Nothing to do."""

    def remove(self, blocks: Sequence[int]) -> None:
        """Nothing to do."""

    def clear(self) -> None:
        """Nothing to do."""

    def check(self) -> None:
        """Nothing to check."""
