"""Block digests of prompts, hashed once for the whole fleet; otherwise every pod would hash the same prefixes."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from engine.cache.eviction import Eviction
from engine.cache.prefix_cache import PrefixCache
from engine.cache.sequence import CachedSequence

_PIECE_TOKENS = 512
_PIECES = 8192
"""Number of pieces that are kept, the most recently used ones. With blocks of 16 tokens, each takes about 8 KB."""

_Key = tuple[int, bytes, bytes, bytes]
_Blocks = tuple[list[bytes], list[bytes]]


class SharedDigests:
    """Digests and contents of the blocks in a piece of a prompt. The key of a piece has everything that determines
    them."""

    def __init__(self) -> None:
        self._pieces: OrderedDict[_Key, _Blocks] = OrderedDict()

    def get(self, key: _Key) -> _Blocks | None:
        """Return the blocks of a piece, if they are known."""
        found = self._pieces.get(key)
        if found is not None:
            self._pieces.move_to_end(key)
        return found

    def keep(self, key: _Key, blocks: _Blocks) -> None:
        """Remember a piece's blocks."""
        self._pieces[key] = blocks
        if len(self._pieces) > _PIECES:
            self._pieces.popitem(last=False)


class SharingCache(PrefixCache):
    """A pod's cache that looks up digests in the fleet before it computes them. Both ways give equal digests."""

    def __init__(
        self,
        blocks_total: int,
        block_size: int,
        shared: SharedDigests,
        *,
        eviction: Eviction = Eviction.LRU,
        pinned_blocks: int = 0,
        learnt_blocks: int = 0,
    ) -> None:
        super().__init__(
            blocks_total, block_size, eviction=eviction, pinned_blocks=pinned_blocks, learnt_blocks=learnt_blocks
        )
        self._shared = shared
        self._piece_blocks = max(1, _PIECE_TOKENS // block_size)

    def append(self, sequence: CachedSequence, tokens: Sequence[int]) -> None:
        """See `PrefixCache.append`. The first tokens of a sequence are its prompt."""
        if sequence.digests or len(tokens) < self._piece_blocks * self.block_size:
            sequence.extend(tokens)
        else:
            self._append_prompt(sequence, tokens)

    def _append_prompt(self, sequence: CachedSequence, tokens: Sequence[int]) -> None:
        digests, contents, size = sequence.digests, sequence.contents, self._piece_blocks * self.block_size
        parent, start = b"", 0
        while start + size <= len(tokens):
            piece = array("i", tokens[start : start + size])
            key = (self.block_size, sequence.salt, parent, piece.tobytes())
            found = self._shared.get(key)
            if found is None:
                sequence.extend(piece)
                self._shared.keep(key, (digests[-self._piece_blocks :], contents[-self._piece_blocks :]))
            else:
                digests += found[0]
                contents += found[1]
                sequence.packed += key[3]
            parent = digests[-1]
            start += size
        sequence.extend(tokens[start:])
