"""Which blocks were evicted recently, and how many requests shared them.

Such blocks show whether the pool is too small for the requests. And if a block was shared before it was evicted, it
counts as shared when it comes back. Otherwise, if a flood of prompts that are used once evicts a hot prefix, the prefix
would be worth no more than those prompts when it comes back.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence

_SLOTS_PER_BLOCK = 4
_MOST_SLOTS = 2**20
"""They take 8 MiB."""
_UNKNOWN_IN_A_ROW = 8
"""The search ends after so many unknown digests, so that a long prompt costs little if no part of it was evicted."""
_DIGEST_BYTES = 8
_USES_BITS = 4
_MOST_USES = (1 << _USES_BITS) - 1
"""The lowest bits of a digest are its place in the table and need not be stored. In a slot these bits hold the uses."""
_LEAST_SLOTS = 1 << _USES_BITS


class EvictedLately:
    """Digests of evicted blocks. Each is kept until about four pools of other blocks have been evicted.

    The table has no chains: a new digest overwrites an old one. So noting a digest costs the same at any size, and the
    table takes only some 32 bytes a block. It sometimes fails to recognise a block that is asked for.
    """

    def __init__(self, blocks: int) -> None:
        slots = max(_LEAST_SLOTS, min(1 << (_SLOTS_PER_BLOCK * blocks - 1).bit_length(), _MOST_SLOTS))
        self._mask = slots - 1
        self._slots = array("Q", bytes(8 * slots))

    def note(self, digests: Iterable[bytes], uses: Iterable[int]) -> None:
        """Note that the blocks of these digests were evicted, each after this many uses; 15 stands for 15 or more."""
        slots, mask = self._slots, self._mask
        shorts = array("Q", b"".join([digest[:_DIGEST_BYTES] for digest in digests]))
        if sys.byteorder == "big":
            shorts.byteswap()
        for short, many in zip(shorts, uses, strict=True):
            slots[short & mask] = short & ~_MOST_USES | (many if many < _MOST_USES else _MOST_USES)

    def has(self, digest: bytes) -> bool:
        """Whether the block of this digest was evicted recently."""
        short = int.from_bytes(digest[:_DIGEST_BYTES], "little")
        return self._slots[short & self._mask] | _MOST_USES == short | _MOST_USES

    def take(self, digests: Sequence[bytes], start: int) -> bytes:
        """Return the uses of those of digests[start:] that were evicted recently, and forget them. `digests` form a
        chain.

        All digests up to the last known one count: a block is evicted before the blocks that it follows, so all blocks
        before a known block were evicted later. An unknown block gets the uses of the next known one, because it had at
        least as many. The search ends after a few unknown digests in a row.
        """
        slots, mask = self._slots, self._mask
        known, uses = start, bytearray()
        for i in range(start, len(digests)):
            short = int.from_bytes(digests[i][:_DIGEST_BYTES], "little")
            slot = slots[short & mask]
            if slot | _MOST_USES == short | _MOST_USES:
                slots[short & mask] = 0
                uses += bytes([slot & _MOST_USES]) * (i + 1 - known)
                known = i + 1
            elif i - known == _UNKNOWN_IN_A_ROW - 1:
                break
        return bytes(uses)

    def clear(self) -> None:
        """Forget every digest."""
        self._slots[:] = array("Q", bytes(8 * len(self._slots)))
