"""A radix tree over token ids. It finds the longest prefix that any chain shares with a prompt, to the token."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

from engine.cache.index import Match
from engine.cache.indexed import NO_BLOCK, IndexedBlocks
from engine.cache.radix_node import TOKEN_BYTES, RadixNode, common_tokens
from engine.cache.sequence import CachedSequence

_NO_BLOCKS: array[int] = array("i")


class RadixIndex:
    """A `PrefixIndex`: a tree for each salt, whose edges are split where two chains first differ.

    A match shorter than a block counts as no match: chat templates begin with the same few tokens, which are not worth
    a copy and do not interest a reader of `cached_tokens`.

    A match costs a comparison of bytes and a step for each edge. A sequence remembers the edge that it reached. The
    edge stands for the same tokens until it is removed, because a split leaves the upper part in the same object. What
    was compared on that edge is not compared again until the edge is cut.
    """

    def __init__(self, indexed: IndexedBlocks, block_size: int, supersede: Callable[[int], None]) -> None:
        """`supersede` is called with each partly filled block when another block has its rows and more after them."""
        self._indexed = indexed
        self._size = block_size
        self._supersede = supersede
        self.roots: dict[bytes, RadixNode] = {}
        """Salt -> root of its tree."""
        self._salts: dict[RadixNode, bytes] = {}
        """Root -> salt."""
        self._node_of: dict[int, RadixNode] = {}
        """Last block of an edge -> the edge; edges without blocks are left out."""

    def count(self, sequence: CachedSequence, limit: int) -> int:
        """See `PrefixIndex.count`."""
        tokens = self._descend(sequence, limit)[1]
        return tokens if tokens >= self._size else 0

    def match(self, sequence: CachedSequence, limit: int) -> Match:
        """See `PrefixIndex.match`."""
        node, tokens = self._descend(sequence, limit)
        if node is None or tokens < self._size:
            return Match([])
        whole = tokens // self._size
        rows = tokens - whole * self._size
        if not rows:
            return Match(self._path(node, 0, whole))
        return Match(self._path(node, 0, whole), self._holder(node, whole), rows)

    def add(self, sequence: CachedSequence, first: int, stop: int) -> list[int]:
        """See `PrefixIndex.add`."""
        size, indexed = self._size, self._indexed
        node, tokens = self._descend(sequence, stop * size, first * size)
        there = tokens // size
        found = [] if node is None or there <= first else self._path(node, first, there)
        if there < stop:
            added = sequence.blocks[there:stop]
            self._insert(sequence, node, tokens, stop * size, added)
            parent = found[-1] if found else sequence.nodes[first - 1] if first else NO_BLOCK
            indexed.add_chain(added, sequence.digests[there:stop], parent)
            found += added
        return found

    def add_tail(self, sequence: CachedSequence, tokens: int) -> None:
        """See `PrefixIndex.add_tail`."""
        i = tokens // self._size
        node, there = self._descend(sequence, tokens, i * self._size)
        if there < tokens:
            block = sequence.blocks[i]
            self._insert(sequence, node, there, tokens, [block])
            if self._indexed.digests[block] is None:
                self._indexed.add_tail(block, sequence.nodes[i - 1] if i else NO_BLOCK)

    def remove(self, blocks: Sequence[int]) -> None:
        """See `PrefixIndex.remove`. When a block's turn comes, it is the last one of an edge without children."""
        node: RadixNode | None = None
        for block in blocks:
            if node is None or not node.blocks or node.blocks[-1] != block:
                if node is not None:
                    self._shorten(node)
                node = self._node_of.pop(block)
            node.blocks.pop()
        if node is not None:
            self._shorten(node)

    def _shorten(self, node: RadixNode) -> None:
        """Cut this edge, which has no children, after blocks were removed from its end."""
        while node.children is None and not self._trim(node):
            parent = node.parent
            if parent is None:
                return
            parent.drop(node)
            node = parent
        if node.children is not None and len(node.children) == 1 and node.parent is not None:
            self._merge(node)

    def clear(self) -> None:
        """See `PrefixIndex.clear`."""
        for node in self.nodes():
            node.is_alive = False
        self.roots.clear()
        self._salts.clear()
        self._node_of.clear()

    def nodes(self) -> Iterator[RadixNode]:
        """Iterate over every edge of the tree, a parent before its children."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            yield node
            if node.children is not None:
                stack += node.children.values()

    def check(self) -> None:
        """See `PrefixIndex.check`."""
        last: dict[int, RadixNode] = {}
        held: list[int] = []
        parent_of: dict[RadixNode, int] = dict.fromkeys(self.roots.values(), NO_BLOCK)
        for node in self.nodes():
            parent = parent_of[node]
            for block in node.blocks:
                _require(self._indexed.parents[block] == parent, f"block {block}: its parent is the block before it")
                parent = block
            if node.blocks:
                last[node.blocks[-1]] = node
            held += node.blocks
            self._check_edge(node)
            for token, child in (node.children or {}).items():
                parent_of[child] = parent
                _require(child.parent is node and child.label[:TOKEN_BYTES] == token, "a child has the right key")
                _require(child.start == node.end, "an edge begins where the one before it ends")
        in_index = {block for block, digest in enumerate(self._indexed.digests) if digest is not None}
        _require(len(held) == len(in_index) and set(held) == in_index, "each indexed block is in one edge")
        _require(last == self._node_of, "the edge of each edge's last block is known")

    def _check_edge(self, node: RadixNode) -> None:
        _require(node.is_alive and len(node.label) % TOKEN_BYTES == 0, "an edge of the tree has whole tokens")
        whole = node.end // self._size - node.start // self._size
        has_tail = node.children is None and node.end % self._size != 0
        _require(len(node.blocks) == whole + has_tail, "an edge has the blocks that end in it")
        if node.parent is not None:
            _require(bool(node.label) and (node.children is None or len(node.children) > 1), "an edge leads to a fork")
            _require(node.children is not None or bool(node.blocks), "an edge without children has a block")
        for j, block in enumerate(node.blocks):
            is_tail = has_tail and j == whole
            _require((self._indexed.digests[block] == b"") == is_tail, f"block {block}: only the last one is a tail")

    def _descend(self, sequence: CachedSequence, limit: int, known: int = 0) -> tuple[RadixNode | None, int]:
        """Return the edge on which the sequence leaves the tree or reaches `limit` tokens, and the number of tokens
        up to there.

        `known`: at least this many tokens of the sequence are in the tree.
        """
        data, node = sequence.packed, sequence.place
        limit = min(limit, len(data) // TOKEN_BYTES)
        if node is None or not node.is_alive or node.start > limit:
            node = self.roots.get(sequence.salt)
            if node is None:
                return None, 0
        elif node.cuts == sequence.cuts:
            known = max(known, sequence.reached)
        while True:
            start = node.start
            tokens = start + common_tokens(node.label, data, start, limit - start, max(0, known - start))
            if tokens == limit or tokens < node.end:
                break
            child = node.child(bytes(data[tokens * TOKEN_BYTES : (tokens + 1) * TOKEN_BYTES]))
            if child is None:
                break
            node = child
        sequence.place, sequence.reached, sequence.cuts = node, tokens, node.cuts
        return node, tokens

    def _path(self, node: RadixNode, first: int, stop: int) -> list[int]:
        """Return the whole blocks first .. stop - 1 of the chain that ends with this edge."""
        size, parts = self._size, []
        up: RadixNode | None = node
        while up is not None:
            begin = up.start // size
            parts.append(up.blocks[max(0, first - begin) : max(0, stop - begin)])
            if begin <= first:
                break
            up = up.parent
        path: list[int] = []
        for part in reversed(parts):
            path += part
        return path

    def _holder(self, node: RadixNode, i: int) -> int:
        """Return a block that holds this edge's rows of the chain's block i. Every chain through the edge has such a
        block; return any of them."""
        while i - node.start // self._size >= len(node.blocks):
            assert node.children is not None
            node = next(iter(node.children.values()))
        return node.blocks[i - node.start // self._size]

    def _insert(
        self, sequence: CachedSequence, node: RadixNode | None, start: int, end: int, blocks: list[int]
    ) -> None:
        """Put the sequence's tokens start .. end - 1 after the first `start` tokens of the edge's chain.

        `blocks`: the blocks that end among these tokens; the last one may be partly filled.
        """
        if node is None:
            node = self.roots[sequence.salt] = RadixNode(None, 0, bytearray(), _NO_BLOCKS[:])
            self._salts[node] = sequence.salt
        if start < node.end:
            self._split(node, start)
        label = sequence.packed[start * TOKEN_BYTES : end * TOKEN_BYTES]
        if node.children is not None or node.parent is None:
            leaf = RadixNode(node, start, label, array("i", blocks))
            node.adopt(leaf)
            self._node_of[blocks[-1]] = leaf
            return
        if node.blocks:
            self._node_of.pop(node.blocks[-1], None)
        replaced = node.blocks.pop() if start % self._size else None
        node.label += label
        node.blocks.extend(blocks)
        self._node_of[blocks[-1]] = node
        if replaced is not None and replaced != blocks[0]:
            self._supersede(replaced)

    def _split(self, node: RadixNode, at: int) -> None:
        """End the edge at this position. The part after it becomes a separate edge."""
        cut, kept = (at - node.start) * TOKEN_BYTES, at // self._size - node.start // self._size
        lower = RadixNode(node, at, node.label[cut:], node.blocks[kept:])
        for child in (node.children or {}).values():
            lower.adopt(child)
        node.cut(at)
        del node.blocks[kept:]
        node.children = None
        node.adopt(lower)
        for part in (node, lower):
            if part.blocks:
                self._node_of[part.blocks[-1]] = part

    def _trim(self, node: RadixNode) -> bool:
        """End an edge without children at the end of its last block; return False if it has no block left."""
        if not node.blocks:
            if node.parent is None:
                node.is_alive = False
                del self.roots[self._salts.pop(node)]
            return False
        node.cut((node.start // self._size + len(node.blocks)) * self._size)
        self._node_of[node.blocks[-1]] = node
        return True

    def _merge(self, node: RadixNode) -> None:
        """Join this edge with its only child."""
        assert node.children is not None
        (lower,) = node.children.values()
        if node.blocks:
            del self._node_of[node.blocks[-1]]
        node.drop(lower)
        node.label += lower.label
        node.blocks += lower.blocks
        for child in (lower.children or {}).values():
            node.adopt(child)
        if node.blocks:
            self._node_of[node.blocks[-1]] = node


def _require(condition: bool, invariant: str) -> None:
    if not condition:
        raise AssertionError(f"cache invariant violated: {invariant}")
