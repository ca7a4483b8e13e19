"""An edge of the radix tree, with the node at its end."""

from __future__ import annotations

from array import array

TOKEN_BYTES = 4
_CHUNK = 4096


class RadixNode:
    """Tokens from position `start` on that all chains through this edge share, and the blocks that end among them.

    A block belongs to the edge that has the block's last row. So an edge that ends within a block has no block for the
    edge's last rows: each chain through the edge has a block of its own that begins with these rows. Blocks are arrays,
    not lists, so that the interpreter's garbage collector walks one object for an edge of any length.
    """

    __slots__ = ("blocks", "children", "cuts", "is_alive", "label", "parent", "start")

    def __init__(self, parent: RadixNode | None, start: int, label: bytearray, blocks: array[int]) -> None:
        self.parent = parent
        self.start = start
        """Position of the first token of the label."""
        self.label = label
        """Token ids, `TOKEN_BYTES` bytes each."""
        self.blocks = blocks
        """Block numbers in order; the first one holds position `start`. Without children, the last one may be partly
        filled."""
        self.children: dict[bytes, RadixNode] | None = None
        """First token of a child's label -> the child; None without children."""
        self.cuts = 0
        """How often the end of the label was cut: the label may have got other tokens there since."""
        self.is_alive = True
        """Whether the edge is in the tree. While it is, `start` and the label's beginning stay the same."""

    @property
    def end(self) -> int:
        """Position after the last token of the label."""
        return self.start + len(self.label) // TOKEN_BYTES

    def cut(self, end: int) -> None:
        """Cut the label so that it ends before this position."""
        del self.label[(end - self.start) * TOKEN_BYTES :]
        self.cuts += 1

    def child(self, token: bytes) -> RadixNode | None:
        """Return the child that begins with this token; None if there is none."""
        return None if self.children is None else self.children.get(token)

    def adopt(self, child: RadixNode) -> None:
        """Add a child."""
        child.parent = self
        if self.children is None:
            self.children = {}
        self.children[bytes(child.label[:TOKEN_BYTES])] = child

    def drop(self, child: RadixNode) -> None:
        """Remove a child."""
        assert self.children is not None
        del self.children[bytes(child.label[:TOKEN_BYTES])]
        child.is_alive = False
        if not self.children:
            self.children = None


def common_tokens(label: bytearray, tokens: bytearray, start: int, most: int, known: int = 0) -> int:
    """Return how many of the label's first `most` tokens equal the tokens from position `start` on.

    `known`: this many leading tokens are known to be equal.
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
