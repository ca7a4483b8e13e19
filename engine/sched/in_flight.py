"""Blocks that running prefills are about to compute, so that equal prompts in flight are computed once."""

from __future__ import annotations

from engine.cache.sequence import CachedSequence


class InFlightBlocks:
    """Digest of a block -> the sequence that computes it. A claim ends when its block is computed or its owner ends."""

    def __init__(self) -> None:
        self._owner: dict[bytes, CachedSequence] = {}

    def claim(self, sequence: CachedSequence, first: int) -> None:
        """Note that the sequence computes its blocks from index `first` on."""
        for digest in sequence.digests[first:]:
            self._owner.setdefault(digest, sequence)

    def end(self, sequence: CachedSequence, first: int, stop: int | None = None) -> None:
        """End the sequence's claims on its blocks `first` .. `stop - 1` (None: on all from `first` on)."""
        for digest in sequence.digests[first:stop]:
            if self._owner.get(digest) is sequence:
                del self._owner[digest]

    def covers(self, sequence: CachedSequence, block: int, known_tokens: int) -> bool:
        """Whether another sequence computes a block that equals this sequence's block `block`, and that this sequence
        could reuse."""
        reusable = min((known_tokens - 1) // sequence.block_size, len(sequence.digests))
        return block < reusable and sequence.digests[block] in self._owner
