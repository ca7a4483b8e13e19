"""The seam between the cache and how it finds what equals the beginning of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from engine.cache.sequence import CachedSequence


class IndexKind(StrEnum):
    """How equal beginnings are found."""

    HASH = "hash"
    """Whole blocks by chained digest."""
    RADIX = "radix"
    """Tokens, by a radix tree; the last ones may be the first rows of a block."""
    OFF = "off"
    """Not at all."""


@dataclass(slots=True)
class Match:
    """What holds the beginning of a sequence. Not changed once made, though not frozen (`engine/sched/plan.py`)."""

    nodes: Sequence[int]
    """Whole blocks, in order."""
    source: int | None = None
    """A block whose first rows are those behind them; it follows `nodes`."""
    rows: int = 0
    """Rows of `source` that are the sequence's."""


class PrefixIndex(Protocol):
    """Which block holds which part of a chain. Blocks are numbers: references, eviction and keys are `PrefixCache`'s.

    A block is in the index from its `add` to its `remove`, and its parent is too. Every block in it is in
    `IndexedBlocks`, where the index notes its digest and its parent.
    """

    def count(self, sequence: CachedSequence, limit: int) -> int:
        """Tokens that `match` would find, at most `limit`. Cheap when asked again and again for the same sequence."""
        ...

    def match(self, sequence: CachedSequence, limit: int) -> Match:
        """The longest beginning of the sequence that is there, of at most `limit` tokens."""
        ...

    def add(self, sequence: CachedSequence, first: int, stop: int) -> list[int]:
        """For each of the sequence's full blocks first .. stop - 1 the indexed block equal to it, or else that block
        itself, which is indexed now.

        The blocks before them, `sequence.nodes[:first]`, are indexed. Fewer are returned where one can be neither.
        """
        ...

    def add_tail(self, sequence: CachedSequence, tokens: int) -> None:
        """Index the sequence's block that holds the last of its first `tokens` tokens, and is not full.

        All blocks before it are in `sequence.nodes`. An index of whole blocks does nothing.
        """
        ...

    def remove(self, blocks: Sequence[int]) -> None:
        """These indexed blocks are to hold something else, in this order: a block goes after those behind it."""
        ...

    def clear(self) -> None:
        """No block is in the index."""
        ...

    def check(self) -> None:
        """Raises AssertionError where an invariant of its own does not hold. Visits everything: for tests."""
        ...


class NoIndex:
    """Finds nothing and takes nothing."""

    def count(self, sequence: CachedSequence, limit: int) -> int:
        """0."""
        return 0

    def match(self, sequence: CachedSequence, limit: int) -> Match:
        """No block."""
        return Match(())

    def add(self, sequence: CachedSequence, first: int, stop: int) -> list[int]:
        """None of them."""
        return []

    def add_tail(self, sequence: CachedSequence, tokens: int) -> None:
        """Nothing to do."""

    def remove(self, blocks: Sequence[int]) -> None:
        """Nothing to do."""

    def clear(self) -> None:
        """Nothing to do."""

    def check(self) -> None:
        """Nothing to check."""
