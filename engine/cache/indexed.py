"""What the indexed blocks hold: columns by block number, because a pool may have a million of them.

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
    """Full blocks by digest. Read `of` and the columns; change them by the methods alone."""

    def __init__(self, total: int) -> None:
        self.of: dict[bytes, int] = {}
        """Digest -> block."""
        self.digests: list[bytes | None] = [None] * total
        """None: the block is not indexed, and the other columns say nothing of it."""
        self.parents = [NO_BLOCK] * total
        """The block before it, which is indexed for as long as this one is: so its number names it."""
        self.depths = array("i", bytes(4 * total))
        """Blocks before it in its chain."""
        self.is_followed = bytearray(total)
        """Whether a block behind it was ever indexed while it was."""
        self.contents = [b""] * total
        """`token_bytes` of the block; a first block's are preceded by the salt."""
        self.keys: list[tuple[PrefixKey, ...]] = [()] * total
        """Prefix keys anchored here, parents first."""

    def add(self, block: int, digest: bytes, parent: int, content: bytes) -> None:
        """Index the block."""
        self.of[digest] = block
        self.digests[block], self.parents[block], self.contents[block] = digest, parent, content
        self.is_followed[block] = False
        if parent == NO_BLOCK:
            self.depths[block] = 0
        else:
            self.depths[block] = self.depths[parent] + 1
            self.is_followed[parent] = True

    def remove(self, block: int) -> tuple[PrefixKey, ...]:
        """The block is to hold something else; the keys that were anchored there."""
        digest = self.digests[block]
        if digest is None:
            return ()
        del self.of[digest]
        keys = self.keys[block]
        self.digests[block], self.contents[block], self.keys[block] = None, b"", ()
        return keys

    def clear(self) -> None:
        """No block is indexed. The columns stay the same objects: they are frozen."""
        total = len(self.digests)
        self.of.clear()
        self.digests[:] = [None] * total
        self.contents[:] = [b""] * total
        self.keys[:] = [()] * total
