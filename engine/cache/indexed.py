"""What is known of indexed blocks: columns by block number, because a pool may have a million of them.

An object for each block would be walked by every collection of the interpreter's oldest generation: 0.2 s for a million
of them, and 0.7 s where each has a list. Columns are a handful of objects, made at the start and frozen
(`engine/contract/collector.py`), of values that the collector does not track.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from engine.contract.prefix_key import PrefixKey

NO_BLOCK = -1
"""The parent of a chain's first block."""


class IndexedBlocks:
    """The blocks that an index holds, whichever it is. Read the columns; change them by the methods alone."""

    def __init__(self, total: int) -> None:
        self.digests: list[bytes | None] = [None] * total
        """Of the block's chain up to its end; empty: the block is not full. None: the block is not indexed, and the
        other columns say nothing of it."""
        self.parents = [NO_BLOCK] * total
        """The block before it, which is indexed for as long as this one is: so its number names it."""
        self.depths = array("i", bytes(4 * total))
        """Blocks before it in its chain."""
        self.is_followed = bytearray(total)
        """Whether a full block behind it was ever indexed while it was."""
        self.keys: list[tuple[PrefixKey, ...]] = [()] * total
        """Prefix keys anchored here, parents first."""
        self.count = 0
        """Blocks that are indexed."""

    def add(self, block: int, digest: bytes, parent: int) -> None:
        """The block is indexed now."""
        self.count += self.digests[block] is None
        self.digests[block], self.parents[block] = digest, parent
        self.is_followed[block] = False
        if parent == NO_BLOCK:
            self.depths[block] = 0
        else:
            self.depths[block] = self.depths[parent] + 1
            self.is_followed[parent] = True

    def add_chain(self, blocks: Sequence[int], digests: Sequence[bytes], parent: int) -> None:
        """These blocks are indexed now, each the parent of the next one."""
        if not blocks:
            return
        depth = 0
        if parent != NO_BLOCK:
            depth = self.depths[parent] + 1
            self.is_followed[parent] = True
        ours, parents, depths, is_followed = self.digests, self.parents, self.depths, self.is_followed
        for block, digest in zip(blocks, digests, strict=True):
            self.count += ours[block] is None
            ours[block], parents[block], depths[block], is_followed[block] = digest, parent, depth, True
            parent = block
            depth += 1
        is_followed[parent] = False

    def add_tail(self, block: int, parent: int) -> None:
        """The block is indexed now, though it is not full."""
        self.count += self.digests[block] is None
        self.digests[block], self.parents[block] = b"", parent
        self.is_followed[block] = False
        self.depths[block] = 0 if parent == NO_BLOCK else self.depths[parent] + 1

    def remove(self, blocks: Iterable[int]) -> list[PrefixKey]:
        """These indexed blocks are to hold something else, in this order; the keys anchored there, children first."""
        digests, keys = self.digests, self.keys
        gone: list[PrefixKey] = []
        for block in blocks:
            self.count -= 1
            digests[block] = None
            if keys[block]:
                gone += reversed(keys[block])
                keys[block] = ()
        return gone

    def clear(self) -> None:
        """No block is indexed. The columns stay the same objects: they are frozen."""
        total, self.count = len(self.digests), 0
        self.digests[:] = [None] * total
        self.keys[:] = [()] * total
