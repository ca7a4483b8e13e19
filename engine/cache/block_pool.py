"""KV blocks as numbers: reference counts, free blocks, and idle ones in order of eviction. Knows nothing of tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Block ids 0 .. total-1, each in exactly one state, every operation O(1).

    free: no reference, nothing worth keeping; used before any idle block is evicted.
    idle: no reference, kept for reuse; evicted oldest first.
    used: one or more references.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._references = [0] * total
        self._free = list(range(total - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that can be taken now, idle ones included."""
        return len(self._free) + len(self._idle)

    def references(self, block: int) -> int:
        """References to the block."""
        return self._references[block]

    def take(self) -> tuple[int, bool]:
        """A block with one reference, and whether it was idle (the caller forgets what it held).

        Raises IndexError where nothing is available: callers ask first.
        """
        if self._free:
            block, was_idle = self._free.pop(), False
        elif self._idle:
            (block, _), was_idle = self._idle.popitem(last=False), True
        else:
            raise IndexError("no KV block is available")
        self._references[block] = 1
        return block, was_idle

    def add_references(self, blocks: Iterable[int]) -> None:
        """One more user of each of these idle or used blocks."""
        references, idle = self._references, self._idle
        for block in blocks:
            if references[block] == 0:
                del idle[block]
            references[block] += 1

    def drop_references(self, blocks: Iterable[int], keep: Iterable[bool]) -> None:
        """One user less of each, in this order; the last one leaves a block idle (`keep`) or free."""
        references, idle, free = self._references, self._idle, self._free
        for block, is_kept in zip(blocks, keep, strict=True):
            left = references[block] = references[block] - 1
            if left == 0:
                if is_kept:
                    idle[block] = None
                else:
                    free.append(block)

    def free_idle(self) -> int:
        """Make every idle block free; returns how many."""
        count = len(self._idle)
        self._free.extend(self._idle)
        self._idle.clear()
        return count

    def free_blocks(self) -> Sequence[int]:
        """Free blocks."""
        return tuple(self._free)

    def idle_blocks(self) -> Sequence[int]:
        """Idle blocks, next to be evicted first."""
        return tuple(self._idle)
