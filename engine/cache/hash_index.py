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
        """By block: its `token_bytes`; before them, in a chain's first block, the salt's digest. The salt itself is in
        no tier and in no file."""

    def count(self, sequence: CachedSequence, limit: int) -> int:
        """See `PrefixIndex.count`. Compares digests alone, and starts from the last count for this sequence."""
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
        """See `PrefixIndex.add`. Ends at a block whose digest belongs to a block of another chain."""
        of, contents, indexed = self.of, self.contents, self._indexed
        parent = sequence.nodes[first - 1] if first else NO_BLOCK
        blocks, digests = sequence.blocks[first:stop], sequence.digests[first:stop]
        fresh = dict(zip(digests, blocks, strict=True))
        if len(fresh) == len(blocks) and of.keys().isdisjoint(fresh):  # nearly always true; takes half the time
            indexed.add_chain(blocks, digests, parent)
            of.update(fresh)
            for block, content in zip(blocks, sequence.contents[first:stop], strict=True):
                contents[block] = content
            return blocks
        found: list[int] = []
        for block, digest, content in zip(blocks, digests, sequence.contents[first:stop], strict=True):
            node = of.get(digest)
            if node is None:
                node = block
                indexed.add(node, digest, parent)
                of[digest], contents[node] = node, content
            elif indexed.parents[node] != parent or contents[node] != content:
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
        """See `PrefixIndex.clear`. The columns stay the same objects, because the collector has frozen them."""
        self.of.clear()
        self.contents[:] = [b""] * len(self.contents)

    def check(self) -> None:
        """See `PrefixIndex.check`. Also checks that each digest is made of the block's content and its parent."""
        digests, parents, width = self._indexed.digests, self._indexed.parents, 4 * self._block_size
        in_index = {block for block, digest in enumerate(digests) if digest is not None}
        if set(self.of.values()) != in_index or len(self.of) != len(in_index):
            raise AssertionError("cache invariant violated: digests and indexed blocks are the same")
        for digest, block in self.of.items():
            root, tokens = self.contents[block][:-width], self.contents[block][-width:]
            parent = root if parents[block] == NO_BLOCK else digests[parents[block]]
            if digests[block] != digest or parent is None or digest != chain_digest(parent, tokens):
                raise AssertionError(f"cache invariant violated: block {block}: digest of its content and parent")
