"""One request's side of the cache: the hash chain of its tokens and the blocks it uses."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.cache.hashing import chain_digest, root_digest, token_bytes
from engine.cache.held_keys import Anchor
from engine.cache.radix_node import RadixNode


@dataclass(slots=True, eq=False)
class CachedSequence:
    """Changed by `PrefixCache` alone; others may read `blocks` and `digests`."""

    block_size: int
    salt: bytes
    anchors: tuple[Anchor, ...]
    digests: list[bytes] = field(default_factory=list)
    """One per full block of known tokens; none where the cache is disabled."""
    contents: list[bytes] = field(default_factory=list)
    """As `HashIndex.contents`, one per digest."""
    blocks: list[int] = field(default_factory=list)
    """Pool blocks in order of position; empty while the request waits."""
    nodes: list[int] = field(default_factory=list)
    """The indexed chain of the leading full blocks: this request's own block, or an equal one indexed before it."""
    next_anchor: int = 0
    """Anchors before this one are attached to `nodes`."""
    generation: int = 0
    """`PrefixCache` generation in which the blocks were taken."""
    hits: int = 0
    """Leading blocks in the index when last counted: where the next count starts."""
    packed: bytearray = field(default_factory=bytearray)
    """All known tokens as `token_bytes`; none where the cache is disabled."""
    place: RadixNode | None = None
    """In the tree, where `RadixIndex` last found the sequence to leave it: where the next search starts."""
    source: int | None = None
    """A block of another sequence, kept until the step that copies its first rows has ended."""
    _tail: array[int] = field(default_factory=lambda: array("i"))
    """Known tokens behind the last full block, and for a moment those just added."""

    def fork(self) -> CachedSequence:
        """Another sequence of the same tokens, without blocks: they are not hashed again."""
        return CachedSequence(
            self.block_size,
            self.salt,
            self.anchors,
            list(self.digests),
            list(self.contents),
            packed=self.packed[:],
            _tail=self._tail[:],
        )

    def extend(self, tokens: Sequence[int]) -> None:
        """More known tokens follow: digest the blocks they fill."""
        self._tail.extend(tokens)
        self.packed += token_bytes(tokens)
        if len(self._tail) < self.block_size:
            return
        full = len(self._tail) // self.block_size * self.block_size
        data = token_bytes(self._tail[:full])
        del self._tail[:full]
        stride = 4 * self.block_size
        digests, contents = self.digests, self.contents
        parent = digests[-1] if digests else root_digest(self.salt)
        for start in range(0, len(data), stride):
            block = data[start : start + stride]
            parent = chain_digest(parent, block)
            contents.append(block if digests else self.salt + block)
            digests.append(parent)
