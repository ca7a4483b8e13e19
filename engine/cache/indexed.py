"""What is known about indexed blocks: columns by block number, because a pool may have a million blocks.

If each block were an object, every collection of the interpreter's oldest generation would walk them all: 0.2 s for a
million, and 0.7 s if each has a list. Columns are a handful of objects, made at the start and frozen
(`engine/common/collector.py`). The collector does not track their values.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from engine.contract.prefix_key import PrefixKey

NO_BLOCK = -1
"""The parent of a chain's first block."""


class IndexedBlocks:
    """The blocks that an index of any kind holds. Read the columns freely; change them only through the methods."""

    def __init__(self, total: int) -> None:
        self.digests: list[bytes | None] = [None] * total
        """By block, like the next four: the digest of its chain up to the block's end, empty if the block is not full.
        None if the block is not indexed; the other columns then say nothing about it."""
        self.parents = [NO_BLOCK] * total
        """The block before it. A number is enough, because the parent stays indexed as long as this block."""
        self.depths = array("i", bytes(4 * total))
        """Number of blocks before it in its chain."""
        self.is_followed = bytearray(total)
        """Whether a full block that follows it was indexed at any time since this block was."""
        self.keys: list[tuple[PrefixKey, ...]] = [()] * total
        """Prefix keys anchored here, parents first."""
        self.count = 0
        """Number of indexed blocks."""

    def add(self, block: int, digest: bytes, parent: int) -> None:
        """Note that the block is indexed."""
        self.count += self.digests[block] is None
        self.digests[block], self.parents[block] = digest, parent
        self.is_followed[block] = False
        if parent == NO_BLOCK:
            self.depths[block] = 0
        else:
            self.depths[block] = self.depths[parent] + 1
            self.is_followed[parent] = True

    def add_chain(self, blocks: Sequence[int], digests: Sequence[bytes], parent: int) -> None:
        """Note that these blocks are indexed, each the parent of the next one."""
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
        """Note that the block is indexed, though it is not full."""
        self.count += self.digests[block] is None
        self.digests[block], self.parents[block] = b"", parent
        self.is_followed[block] = False
        self.depths[block] = 0 if parent == NO_BLOCK else self.depths[parent] + 1

    def remove(self, blocks: Iterable[int]) -> list[PrefixKey]:
        """Note that these blocks are no longer indexed, in this order; return their keys, children first."""
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
        """Note that no block is indexed. The columns stay the same objects, because the collector has frozen them."""
        total, self.count = len(self.digests), 0
        self.digests[:] = [None] * total
        self.keys[:] = [()] * total
