"""An edge of the radix tree, with the place where it ends."""

from __future__ import annotations

from array import array

TOKEN_BYTES = 4
_CHUNK = 4096


class RadixNode:
    """Tokens from position `start` on that all chains behind this place have in common, and the blocks that end there.

    A block belongs to the edge in which its last row is. So an edge that ends within a block has no block for its last
    rows: each chain behind it has them in a block of its own, as the first rows. Arrays and not lists: the garbage
    collector of the interpreter walks one object for an edge, however long it is.
    """

    __slots__ = ("blocks", "children", "is_alive", "label", "parent", "start")

    def __init__(self, parent: RadixNode | None, start: int, label: bytearray, blocks: array[int]) -> None:
        self.parent = parent
        self.start = start
        """Position of the first token of the label."""
        self.label = label
        """Token ids, `TOKEN_BYTES` each."""
        self.blocks = blocks
        """In order; the first one holds position `start`. The last one may be partly filled where no child is."""
        self.children: dict[bytes, RadixNode] | None = None
        """By the first token of their labels; None where there are none."""
        self.is_alive = True
        """Whether it is in the tree. A place in the tree stands for the same tokens for as long as it is."""

    @property
    def end(self) -> int:
        """Position behind the last token of the label."""
        return self.start + len(self.label) // TOKEN_BYTES

    def child(self, token: bytes) -> RadixNode | None:
        """The edge that goes on with this token."""
        return None if self.children is None else self.children.get(token)

    def adopt(self, child: RadixNode) -> None:
        """One edge more behind this place."""
        child.parent = self
        if self.children is None:
            self.children = {}
        self.children[bytes(child.label[:TOKEN_BYTES])] = child

    def drop(self, child: RadixNode) -> None:
        """The edge has gone."""
        assert self.children is not None
        del self.children[bytes(child.label[:TOKEN_BYTES])]
        child.is_alive = False
        if not self.children:
            self.children = None


def common_tokens(label: bytearray, tokens: bytearray, start: int, most: int, known: int = 0) -> int:
    """How many of the first `most` tokens of the label equal the tokens at position `start` on.

    `known`: as many are known to be equal.
    """
    most = min(most, len(label) // TOKEN_BYTES)
    at, end, offset = known * TOKEN_BYTES, most * TOKEN_BYTES, start * TOKEN_BYTES
    while at < end:
        size = min(_CHUNK, end - at)
        ours, theirs = label[at : at + size], tokens[offset + at : offset + at + size]
        if ours != theirs:
            differing = int.from_bytes(ours, "little") ^ int.from_bytes(theirs, "little")
            return (at + ((differing & -differing).bit_length() - 1) // 8) // TOKEN_BYTES
        at += size
    return most
