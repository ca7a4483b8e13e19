"""One request's side of the cache: the hash chain of its tokens and the blocks it uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.cache.hashing import chain_digest, root_digest, token_bytes
from engine.cache.held_keys import Anchor
from engine.cache.radix_node import RadixNode


@dataclass(slots=True, eq=False)
class CachedSequence:
    """A request's sequence in the cache. Only `PrefixCache` changes it; others may read `blocks` and `digests`."""

    block_size: int
    salt: bytes
    anchors: tuple[Anchor, ...]
    digests: list[bytes] = field(default_factory=list)
    """One per full block of known tokens; empty if the cache is disabled."""
    contents: list[bytes] = field(default_factory=list)
    """Like `HashIndex.contents`, one per digest."""
    blocks: list[int] = field(default_factory=list)
    """Pool blocks in order of position; empty while the request waits."""
    nodes: list[int] = field(default_factory=list)
    """The indexed chain of the leading full blocks: each is this request's own, or an equal one indexed earlier."""
    next_anchor: int = 0
    """Anchors before this one are attached to `nodes`."""
    generation: int = 0
    """`PrefixCache` generation in which the blocks were taken."""
    hits: int = 0
    """Leading blocks in the index at the last count. The next count starts here."""
    packed: bytearray = field(default_factory=bytearray)
    """All known tokens as `token_bytes`; empty if the cache is disabled."""
    place: RadixNode | None = None
    """The edge on which the sequence left the tree when `RadixIndex` last searched. The next search starts there."""
    reached: int = 0
    """Tokens that the sequence had in common with the tree at that search."""
    cuts: int = 0
    """`place.cuts` at that search."""
    spared: int = 0
    """Leading blocks that are spared when they are indexed, if there is room for that (`loops.py`)."""
    remembered_from: int = 0
    remembered: bytes = b""
    """For each block from `remembered_from` on: its uses before it was evicted, which count again."""
    source: int | None = None
    """A block of another sequence, kept until the step that copies its first rows has ended."""

    def fork(self) -> CachedSequence:
        """Return another sequence of the same tokens, without blocks. The tokens are not hashed again."""
        return CachedSequence(
            self.block_size,
            self.salt,
            self.anchors,
            list(self.digests),
            list(self.contents),
            packed=self.packed[:],
        )

    def extend(self, tokens: Sequence[int]) -> None:
        """Append known tokens, and digest the blocks they fill."""
        self.packed += token_bytes(tokens)
        digests, stride = self.digests, 4 * self.block_size
        start = len(digests) * stride
        stop = len(self.packed) // stride * stride
        if start == stop:
            return
        contents, data = self.contents, bytes(self.packed[start:stop])
        parent = digests[-1] if digests else root_digest(self.salt)
        for at in range(0, len(data), stride):
            block = data[at : at + stride]
            parent = chain_digest(parent, block)
            contents.append(block)
            digests.append(parent)
        if start == 0:
            contents[0] = root_digest(self.salt) + contents[0]
