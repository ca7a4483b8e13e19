"""KV blocks as numbers: reference counts, free blocks, idle blocks in order of eviction. Tokens play no part here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.cache.eviction import EvictionOrder, LeastRecentlyUsed

_MOST_USES = 255


class BlockPool:
    """Block ids 0 .. total-1, each in exactly one state. Every operation is O(1), except for the time `order` takes.

    free: no reference, nothing worth keeping; used before any idle block is evicted.
    idle: no reference, kept for reuse; evicted in the order of `order`.
    used: one or more references.
    """

    def __init__(self, total: int, order: EvictionOrder | None = None) -> None:
        """`order`: None evicts the longest unused block first."""
        self.total = total
        self._references = [0] * total
        self._uses = bytearray(total)
        """By block: uses of its content, begun by `begin_uses`, counted by `count_use`; 255 stands for 255 or more.
        A block that gets new content keeps the old content's uses until the new content is indexed."""
        self._free = list(range(total - 1, -1, -1))
        self._pins = 0
        """References that pins hold."""
        self.given_back = 0
        """Times that a block lost its last reference, since the start."""
        self._places: dict[int, int] = {}
        """Block that a request has left while others hold it -> the place in `order` that it would have got then."""
        self.order: EvictionOrder = LeastRecentlyUsed() if order is None else order
        """The idle blocks."""

    @property
    def available(self) -> int:
        """Number of blocks that can be taken now, idle ones included."""
        return len(self._free) + len(self.order)

    def references(self, block: int) -> int:
        """Number of references to the block."""
        return self._references[block]

    def count_idle(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks are idle; each must be idle or used."""
        references = self._references
        return sum([not references[block] for block in blocks])

    def uses(self, block: int) -> int:
        """Number of requests that shared the content of this used or idle block, as far as they were counted."""
        return self._uses[block]

    def take(self, count: int) -> tuple[list[int], list[int]]:
        """Return `count` blocks with one reference each, and those of them that were idle: the caller unindexes these.

        Raises IndexError if fewer are available: callers check first.
        """
        free = self._free
        from_free = min(count, len(free))
        blocks = free[len(free) - from_free :]
        blocks.reverse()
        evicted = self.order.take(count - from_free)
        del free[len(free) - from_free :]
        blocks += evicted
        references = self._references
        for block in blocks:
            references[block] = 1
        return blocks, evicted

    def add_references(self, blocks: Iterable[int]) -> None:
        """Add a user to each of these idle or used blocks."""
        references = self._references
        woken = []
        for block in blocks:
            if references[block] == 0:
                woken.append(block)
            references[block] += 1
        if woken:
            self.order.remove(woken)

    def pin(self, blocks: Sequence[int]) -> None:
        """Let a pin hold each of these used blocks, too; `drop_references` with `is_pin` ends that."""
        self._pins += len(blocks)
        self.add_references(blocks)

    def begin_uses(self, blocks: Iterable[int], before: Iterable[int] = ()) -> None:
        """Note that these blocks have new content. It counts as used once.

        `before`: the uses that the content of the first of these blocks had before it was evicted. They count again.
        """
        uses = self._uses
        for block in blocks:
            uses[block] = 1
        for block, many in zip(blocks, before, strict=False):
            uses[block] = many

    def count_use(self, blocks: Iterable[int]) -> None:
        """Count one more request that shares the content of each of these used blocks."""
        uses = self._uses
        for block in blocks:
            if uses[block] < _MOST_USES:
                uses[block] += 1

    def drop_references(
        self, blocks: Sequence[int], keep: Iterable[bool], *, is_pin: bool = False, was_wanted: bool = True
    ) -> None:
        """Take one user from each block, in this order. Without users, a block becomes idle (`keep`) or free.

        `is_pin`: the user is a pin. Being pinned does not count as a use, so a block becomes idle at the place where
        its last request left it. `was_wanted`: False says that the blocks were kept for requests that have not come.
        Then an eviction order by use evicts those blocks that were used only once before all other blocks.
        """
        references, free = self._references, self._free
        kept, staying = [], []
        for block, is_kept in zip(blocks, keep, strict=True):
            left = references[block] = references[block] - 1
            if left:
                staying.append(block)
            elif is_kept:
                kept.append(block)
            else:
                free.append(block)
        self.given_back += len(blocks) - len(staying)
        if is_pin:
            self._pins -= len(blocks)
            self._put_back(kept, was_wanted=was_wanted)
            return
        if kept:
            self.order.add(kept, self._uses)
        if self._pins and staying:
            place = self.order.places(len(staying))
            self._places.update(zip(staying, range(place, place + len(staying)), strict=True))

    def _put_back(self, blocks: Sequence[int], *, was_wanted: bool) -> None:
        """Make these blocks idle. They were pinned until now."""
        uses = self._uses
        once = [] if was_wanted else [block for block in blocks if uses[block] == 1]
        for block in once:
            uses[block] = 0
        self.order.put_back(blocks, [self._places[block] for block in blocks], uses)
        for block in once:
            uses[block] = 1
        if not self._pins:
            self._places.clear()

    def free(self, block: int) -> None:
        """Make this idle block free: its content is worth nothing any more."""
        self.order.remove((block,))
        self._free.append(block)

    def free_idle(self) -> int:
        """Make every idle block free; return how many there were."""
        count = len(self.order)
        self._free.extend(self.order)
        self.order.clear()
        return count

    def free_blocks(self) -> Sequence[int]:
        """Return the free blocks."""
        return tuple(self._free)

    def idle_blocks(self) -> Sequence[int]:
        """Return the idle blocks in the order of their eviction."""
        return tuple(self.order)
