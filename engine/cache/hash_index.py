"""Whole blocks by chained digest, as in vLLM's automatic prefix caching."""

from __future__ import annotations

from engine.cache.hashing import chain_digest, root_digest
from engine.cache.indexed import NO_BLOCK, IndexedBlocks
from engine.cache.sequence import CachedSequence


class HashIndex:
    """A `PrefixIndex`. A hit compares parent and content at every block: a collision of digests is a miss."""

    def __init__(self, indexed: IndexedBlocks, block_size: int) -> None:
        self._indexed = indexed
        self._block_size = block_size
        self.of: dict[bytes, int] = {}
        """Digest -> block."""
        self.contents = [b""] * len(indexed.digests)
        """`token_bytes` of each indexed block; a first block's are preceded by the salt."""

    def count(self, sequence: CachedSequence, limit: int) -> int:
        """See `PrefixIndex.count`: by digest alone, from the last count for this sequence on."""
        digests, of = sequence.digests, self.of
        most = min(limit // self._block_size, len(digests))
        hits = min(sequence.hits, most)
        while hits and digests[hits - 1] not in of:
            hits -= 1
        while hits < most and digests[hits] in of:
            hits += 1
        sequence.hits = hits
        return hits * self._block_size

    def match(self, sequence: CachedSequence, limit: int) -> list[int]:
        """See `PrefixIndex.match`."""
        find, parents, contents = self.of.get, self._indexed.parents, self.contents
        nodes: list[int] = []
        parent, most = NO_BLOCK, limit // self._block_size
        for digest, content in zip(sequence.digests[:most], sequence.contents, strict=False):
            node = find(digest)
            if node is None or parents[node] != parent or contents[node] != content:
                break
            nodes.append(node)
            parent = node
        return nodes

    def add(self, sequence: CachedSequence, i: int) -> int | None:
        """See `PrefixIndex.add`. None where another chain has the block's digest."""
        parent = sequence.nodes[i - 1] if i else NO_BLOCK
        digest, content = sequence.digests[i], sequence.contents[i]
        node = self.of.get(digest)
        if node is None:
            block = sequence.blocks[i]
            self._indexed.add(block, digest, parent)
            self.of[digest], self.contents[block] = block, content
            return block
        if self._indexed.parents[node] != parent or self.contents[node] != content:
            return None
        return node

    def remove(self, block: int) -> None:
        """See `PrefixIndex.remove`."""
        digest = self._indexed.digests[block]
        if digest is not None:
            del self.of[digest]
            self.contents[block] = b""

    def clear(self) -> None:
        """See `PrefixIndex.clear`. The columns stay the same objects: they are frozen."""
        self.of.clear()
        self.contents[:] = [b""] * len(self.contents)

    def check(self) -> None:
        """See `PrefixIndex.check`: digests are those of content and parent."""
        digests, parents, width = self._indexed.digests, self._indexed.parents, 4 * self._block_size
        in_index = {block for block, digest in enumerate(digests) if digest is not None}
        if set(self.of.values()) != in_index or len(self.of) != len(in_index):
            raise AssertionError("cache invariant violated: digests and indexed blocks are the same")
        for digest, block in self.of.items():
            salt, tokens = self.contents[block][:-width], self.contents[block][-width:]
            parent = root_digest(salt) if parents[block] == NO_BLOCK else digests[parents[block]]
            if digests[block] != digest or parent is None or digest != chain_digest(parent, tokens):
                raise AssertionError(f"cache invariant violated: block {block}: digest of its content and parent")
