"""What was evicted lately: whether the pool is too small for what is asked for."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

_SLOTS_PER_BLOCK = 4
_MOST_SLOTS = 2**20
"""8 MiB."""
_UNKNOWN_IN_A_ROW = 4
"""Behind so many nothing more is looked for, so that a long prompt of which nothing was evicted costs little."""
_DIGEST_BYTES = 8


class EvictedLately:
    """Digests of evicted blocks, each until about four times as many others were evicted as the pool has blocks.

    A table without chains: a digest takes the place of another. So noting one costs the same at any size, some 32 bytes
    a block are all, and now and then a block that is asked for is not recognised.
    """

    def __init__(self, blocks: int) -> None:
        slots = min(1 << (_SLOTS_PER_BLOCK * blocks - 1).bit_length(), _MOST_SLOTS)
        self._mask = slots - 1
        self._slots = array("Q", bytes(8 * slots))

    def note(self, digests: Iterable[bytes]) -> None:
        """The blocks of these digests were evicted."""
        slots, mask, read = self._slots, self._mask, int.from_bytes
        for digest in digests:
            short = read(digest[:_DIGEST_BYTES], "little")
            slots[short & mask] = short

    def take(self, digests: Sequence[bytes], start: int) -> int:
        """How many of digests[start:] were evicted lately, up to a few others in a row. They are forgotten."""
        slots, mask = self._slots, self._mask
        found = unknown = 0
        for i in range(start, len(digests)):
            short = int.from_bytes(digests[i][:_DIGEST_BYTES], "little")
            if slots[short & mask] == short:
                slots[short & mask] = unknown = 0
                found += 1
            elif (unknown := unknown + 1) == _UNKNOWN_IN_A_ROW:
                break
        return found

    def clear(self) -> None:
        """Nothing was evicted."""
        self._slots[:] = array("Q", bytes(8 * len(self._slots)))
