"""What is known of indexed blocks: columns by block number, because a pool may have a million of them.

An object for each block would be walked by every collection of the interpreter's oldest generation: 0.2 s for a million
of them, and 0.7 s where each has a list. Columns are a handful of objects, made at the start and frozen
(`engine/contract/collector.py`), of values that the collector does not track.
"""

from __future__ import annotations

from array import array

from engine.contract.prefix_key import PrefixKey

NO_BLOCK = -1
"""The parent of a chain's first block."""


class IndexedBlocks:
    """The blocks that an index holds, whichever it is. Read the columns; change them by the methods alone."""

    def __init__(self, total: int) -> None:
        self.digests: list[bytes | None] = [None] * total
        """Of the block's chain up to its end. None: the block is not indexed, the other columns say nothing of it."""
        self.parents = [NO_BLOCK] * total
        """The block before it, which is indexed for as long as this one is: so its number names it."""
        self.depths = array("i", bytes(4 * total))
        """Blocks before it in its chain."""
        self.is_followed = bytearray(total)
        """Whether a block behind it was ever indexed while it was."""
        self.keys: list[tuple[PrefixKey, ...]] = [()] * total
        """Prefix keys anchored here, parents first."""

    def add(self, block: int, digest: bytes, parent: int) -> None:
        """The block is indexed now."""
        self.digests[block], self.parents[block] = digest, parent
        self.is_followed[block] = False
        if parent == NO_BLOCK:
            self.depths[block] = 0
        else:
            self.depths[block] = self.depths[parent] + 1
            self.is_followed[parent] = True

    def remove(self, block: int) -> tuple[PrefixKey, ...]:
        """The block is to hold something else; the keys that were anchored there."""
        if self.digests[block] is None:
            return ()
        keys = self.keys[block]
        self.digests[block], self.keys[block] = None, ()
        return keys

    def clear(self) -> None:
        """No block is indexed. The columns stay the same objects: they are frozen."""
        total = len(self.digests)
        self.digests[:] = [None] * total
        self.keys[:] = [()] * total
