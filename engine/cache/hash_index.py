"""Whole blocks by chained digest, as in vLLM's automatic prefix caching."""

from __future__ import annotations

from collections.abc import Sequence

from engine.cache.hashing import chain_digest
from engine.cache.index import Match
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
        """`token_bytes` of each indexed block; a first block's are preceded by the salt's digest. The salt itself is in
        no tier, nor in its files."""

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

    def match(self, sequence: CachedSequence, limit: int) -> Match:
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
        return Match(nodes)

    def add(self, sequence: CachedSequence, first: int, stop: int) -> list[int]:
        """See `PrefixIndex.add`. Ends where another chain has a block's digest."""
        of, contents, indexed, parents = self.of, self.contents, self._indexed, self._indexed.parents
        found: list[int] = []
        parent = sequence.nodes[first - 1] if first else NO_BLOCK
        for i in range(first, stop):
            digest, content = sequence.digests[i], sequence.contents[i]
            node = of.get(digest)
            if node is None:
                node = sequence.blocks[i]
                indexed.add(node, digest, parent)
                of[digest], contents[node] = node, content
            elif parents[node] != parent or contents[node] != content:
                break
            found.append(node)
            parent = node
        return found

    def add_tail(self, sequence: CachedSequence, tokens: int) -> None:
        """See `PrefixIndex.add_tail`."""

    def remove(self, blocks: Sequence[int]) -> None:
        """See `PrefixIndex.remove`."""
        of, digests, contents = self.of, self._indexed.digests, self.contents
        for block in blocks:
            digest = digests[block]
            assert digest is not None
            del of[digest]
            contents[block] = b""

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
            root, tokens = self.contents[block][:-width], self.contents[block][-width:]
            parent = root if parents[block] == NO_BLOCK else digests[parents[block]]
            if digests[block] != digest or parent is None or digest != chain_digest(parent, tokens):
                raise AssertionError(f"cache invariant violated: block {block}: digest of its content and parent")
