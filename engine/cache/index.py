"""The seam between the cache and how it finds what equals the beginning of a prompt."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from engine.cache.sequence import CachedSequence


class IndexKind(StrEnum):
    """How equal beginnings are found."""

    HASH = "hash"
    """Whole blocks by chained digest."""
    OFF = "off"
    """Not at all."""


class PrefixIndex(Protocol):
    """Which block holds which part of a chain. Blocks are numbers: references, eviction and keys are `PrefixCache`'s.

    A block is in the index from its `add` to its `remove`, and its parent is too. Every block in it is in
    `IndexedBlocks`, where the index notes its digest and its parent.
    """

    def count(self, sequence: CachedSequence, limit: int) -> int:
        """Tokens that `match` would find, at most `limit`. Cheap when asked again and again for the same sequence."""
        ...

    def match(self, sequence: CachedSequence, limit: int) -> list[int]:
        """The blocks that hold the longest beginning of the sequence, of at most `limit` tokens, in order."""
        ...

    def add(self, sequence: CachedSequence, i: int) -> int | None:
        """The indexed block equal to the sequence's full block i, or else that block itself, which is indexed now.

        The blocks before it, `sequence.nodes[:i]`, are indexed. None where it can be neither: the sequence's other
        blocks cannot be indexed either then.
        """
        ...

    def remove(self, block: int) -> None:
        """The block is to hold something else. It may not be in the index; no block behind it is."""
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

    def match(self, sequence: CachedSequence, limit: int) -> list[int]:
        """No block."""
        return []

    def add(self, sequence: CachedSequence, i: int) -> int | None:
        """None."""
        return None

    def remove(self, block: int) -> None:
        """Nothing to do."""

    def clear(self) -> None:
        """Nothing to do."""

    def check(self) -> None:
        """Nothing to check."""
