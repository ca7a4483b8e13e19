"""KV blocks as numbers: reference counts, free blocks, and idle ones in order of eviction. Knows nothing of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.cache.eviction import EvictionOrder, LeastRecentlyUsed

_MOST_USES = 255


class BlockPool:
    """Block ids 0 .. total-1, each in exactly one state; every operation is O(1), but for what `order` takes.

    free: no reference, nothing worth keeping; used before any idle block is evicted.
    idle: no reference, kept for reuse; evicted in the order of `order`.
    used: one or more references.
    """

    def __init__(self, total: int, order: EvictionOrder | None = None) -> None:
        """`order`: None evicts the longest unused first."""
        self.total = total
        self._references = [0] * total
        self._uses = bytearray(total)
        """Uses of what the block holds, by `count_use`; 255 stands for more."""
        self._free = list(range(total - 1, -1, -1))
        self.order: EvictionOrder = LeastRecentlyUsed() if order is None else order
        """The idle blocks."""

    @property
    def available(self) -> int:
        """Blocks that can be taken now, idle ones included."""
        return len(self._free) + len(self.order)

    def references(self, block: int) -> int:
        """References to the block."""
        return self._references[block]

    def uses(self, block: int) -> int:
        """Requests to which what this used or idle block holds was common, as far as they were counted."""
        return self._uses[block]

    def take(self, count: int) -> tuple[list[int], list[int]]:
        """`count` blocks with one reference each, and which of them were idle (the caller forgets what those held).

        Raises IndexError where there are fewer: callers ask first.
        """
        free, pop = self._free, self.order.pop
        from_free = min(count, len(free))
        blocks = free[len(free) - from_free :]
        blocks.reverse()
        evicted = [pop() for _ in range(count - from_free)]
        del free[len(free) - from_free :]
        blocks += evicted
        references, uses = self._references, self._uses
        for block in blocks:
            references[block] = uses[block] = 1
        return blocks, evicted

    def add_references(self, blocks: Iterable[int]) -> None:
        """One more user of each of these idle or used blocks."""
        references = self._references
        woken = []
        for block in blocks:
            if references[block] == 0:
                woken.append(block)
            references[block] += 1
        if woken:
            self.order.remove(woken)

    def count_use(self, blocks: Iterable[int]) -> None:
        """What each of these used blocks holds has turned out to be common to one more request."""
        uses = self._uses
        for block in blocks:
            if uses[block] < _MOST_USES:
                uses[block] += 1

    def drop_references(self, blocks: Iterable[int], keep: Iterable[bool], *, was_wanted: bool = True) -> None:
        """One user less of each, in this order; the last one leaves a block idle (`keep`) or free.

        `was_wanted`: False says that it was kept for requests that have not come, so an order by use has a block that
        was used once go before others.
        """
        references, free = self._references, self._free
        kept = []
        for block, is_kept in zip(blocks, keep, strict=True):
            left = references[block] = references[block] - 1
            if left == 0:
                if is_kept:
                    kept.append(block)
                else:
                    free.append(block)
        if not kept:
            return
        uses = self._uses
        once = [] if was_wanted else [block for block in kept if uses[block] == 1]
        for block in once:
            uses[block] = 0
        self.order.add(kept, uses)
        for block in once:
            uses[block] = 1

    def free(self, block: int) -> None:
        """What this idle block holds is worth nothing any more."""
        self.order.remove((block,))
        self._free.append(block)

    def free_idle(self) -> int:
        """Make every idle block free; returns how many."""
        count = len(self.order)
        self._free.extend(self.order)
        self.order.clear()
        return count

    def free_blocks(self) -> Sequence[int]:
        """Free blocks."""
        return tuple(self._free)

    def idle_blocks(self) -> Sequence[int]:
        """Idle blocks, next to be evicted first."""
        return tuple(self.order)
