"""The order in which idle blocks are evicted. Every order is leaf-first: a block goes before the block that it follows.

That holds because the cache releases a block before its parent, and because a user of a block also uses its parents. So
a parent has been used at least as often and at least as late, and its idle children were added before it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from heapq import heapify, heappop, heappush, merge
from typing import Protocol

MOST_USES = 15
"""The most uses that count. A block not asked for again outlives at most this many turnovers of the pool by blocks that
are used once."""
MOST_DEPTH_COST = 1.0
"""The most that `GreedyDual.depth_cost` may be: a bad fit must not make one chain outlive everything."""
_NOT_IDLE = _NONE = -1
_SLACK = 1024
"""Outdated entries that a heap may have in addition to one for each idle block."""
_UNITS = 4096
"""The cost of a chain's first block in units. Costs are rounded down to whole units."""
_BLOCK_BITS, _TURN_BITS = 32, 48
_BLOCK_MASK, _TURN_MASK = (1 << _BLOCK_BITS) - 1, (1 << _TURN_BITS) - 1
_LAST = (1 << 63 + _TURN_BITS) - 1
"""A worth and turn that come after all others."""


def _turn_of(item: tuple[int, int]) -> int:
    return item[1]


class Eviction(StrEnum):
    """Says which idle block is evicted first."""

    LRU = "lru"
    """The longest unused block."""
    LFU = "lfu"
    """The least often used block; uses fade as other blocks are evicted."""
    COST = "cost"
    """The block with the least product of uses and cost to compute again; the product fades in the same way."""


class EvictionOrder(Protocol):
    """Idle blocks in the order of their eviction. It has no clock: the order of the calls is the time."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]:
        """Iterate from the next block to be evicted to the last. Takes the time of a sort: for tests."""
        ...

    def add(self, blocks: Iterable[int], uses: Sequence[int]) -> None:
        """Add blocks that have become idle, in this order: a block comes after all indexed blocks that follow it.

        `uses`: by block, the number of requests that shared its content.
        """
        ...

    def places(self, count: int) -> int:
        """Return the first of `count` consecutive numbers: the places that this many blocks would get now.

        This is for blocks whose last request leaves them while a pin holds them. When the pin ends, `put_back` adds
        them at these places.
        """
        ...

    def put_back(self, blocks: Sequence[int], places: Sequence[int], uses: Sequence[int]) -> None:
        """Add blocks that have become idle, each at the place that `places` gave it when it was last used."""
        ...

    def remove(self, blocks: Iterable[int]) -> None:
        """Take out blocks that are used again: a block comes after those that precede it in its chain."""
        ...

    def take(self, count: int) -> list[int]:
        """Take out and return the next `count` blocks. Raises IndexError, with nothing changed, if there are fewer."""
        ...

    def clear(self) -> None:
        """Take out every block."""
        ...


class LeastRecentlyUsed:
    """The longest unused block goes first. Operations are O(1), but O(log n) for a block that was put back, where n is
    the number of such blocks."""

    def __init__(self) -> None:
        self._idle: OrderedDict[int, int] = OrderedDict()
        """Block -> turn, in the order of the turns, without the blocks put back."""
        self._turn = 0
        self._late: dict[int, int] = {}
        """Block put back -> turn."""
        self._heap: list[int] = []
        """Turn and block in one number, for blocks put back. An entry is outdated if `_late` does not agree."""

    def __len__(self) -> int:
        return len(self._idle) + len(self._late)

    def __iter__(self) -> Iterator[int]:
        late = sorted(self._late.items(), key=_turn_of)
        return (block for block, _ in merge(self._idle.items(), late, key=_turn_of))

    def add(self, blocks: Iterable[int], uses: Sequence[int]) -> None:
        """See `EvictionOrder.add`."""
        idle, turn = self._idle, self._turn
        for block in blocks:
            turn += 1
            idle[block] = turn
        self._turn = turn

    def places(self, count: int) -> int:
        """See `EvictionOrder.places`."""
        self._turn += count
        return self._turn - count + 1

    def put_back(self, blocks: Sequence[int], places: Sequence[int], uses: Sequence[int]) -> None:
        """See `EvictionOrder.put_back`."""
        late = self._late
        for block, turn in zip(blocks, places, strict=True):
            late[block] = turn
            heappush(self._heap, turn << _BLOCK_BITS | block)
        if len(self._heap) > 2 * len(late) + _SLACK:
            self._heap = [turn << _BLOCK_BITS | block for block, turn in late.items()]
            heapify(self._heap)

    def remove(self, blocks: Iterable[int]) -> None:
        """See `EvictionOrder.remove`."""
        idle = self._idle
        for block in blocks:
            if idle.pop(block, None) is None:
                del self._late[block]

    def take(self, count: int) -> list[int]:
        """See `EvictionOrder.take`."""
        if count > len(self):
            raise IndexError("fewer blocks are idle")
        blocks: list[int] = []
        while self._late and len(blocks) < count:
            block = self._oldest_late()
            if block is None:
                blocks.append(self._idle.popitem(last=False)[0])
            else:
                del self._late[block]
                blocks.append(block)
        pop = self._idle.popitem
        blocks += [pop(last=False)[0] for _ in range(count - len(blocks))]
        return blocks

    def clear(self) -> None:
        """See `EvictionOrder.clear`."""
        self._idle.clear()
        self._late.clear()
        self._heap.clear()

    def _oldest_late(self) -> int | None:
        """Return the longest unused block of those put back; None if another block has been unused for longer."""
        heap, late = self._heap, self._late
        while late.get(heap[0] & _BLOCK_MASK) != heap[0] >> _BLOCK_BITS:
            heappop(heap)
        turn = heap[0] >> _BLOCK_BITS
        if self._idle and next(iter(self._idle.values())) < turn:
            return None
        return heap[0] & _BLOCK_MASK


class GreedyDual:
    """The block of least worth goes first. Worth is `floor + uses * cost`, and the floor is the worth of
    the block that was evicted last.

    This is GreedyDual-Size-Frequency (Cherkasova, "Improving WWW Proxies Performance with GDSF Caching Policy", 1998)
    with blocks of one size. As the floor rises, what was worth much long ago becomes worth little compared to what is
    new.

    The cost of a chain's block n is `1 + depth_cost * n`, because attention makes later blocks dearer to compute.
    A block can be worth less than its children, but still goes after them. So only blocks without idle children are in
    the heap, and each operation takes O(log blocks).
    """

    def __init__(self, parents: Sequence[int], depths: Sequence[int], *, depth_cost: float = 0.0) -> None:
        """By block: `parents`, the previous block of its chain or a negative number; `depths`, how many are before
        it."""
        total = len(parents)
        self._parents = parents
        self._depths = depths
        self.depth_cost = depth_cost
        """What each earlier block of the chain adds to a block's cost, as a fraction of the first block's cost."""
        self._children = array("i", bytes(4 * total))
        """By block: its number of idle children. All indexed children of an idle block are idle."""
        self._worth = array("q", [_NOT_IDLE]) * total
        """By block: its worth in units while it is idle."""
        self._turns = array("q", bytes(8 * total))
        """By block: when it became idle. A heap entry with another turn is outdated."""
        self._turn = 0
        self._floor = 0
        self._count = 0
        self._is_spared = bytearray(total)
        self.spared = 0
        """Number of blocks that count as used `MOST_USES` times until they are evicted."""
        self._heap: list[int] = []
        """Blocks without idle children: worth, turn and block in one number, which the garbage collector skips."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        twin = GreedyDual(self._parents, self._depths)
        for name in ("_children", "_worth", "_turns", "_heap", "_is_spared"):
            setattr(twin, name, getattr(self, name)[:])
        twin._turn, twin._floor, twin._count = self._turn, self._floor, self._count
        twin.spared = self.spared
        while twin._count:
            yield from twin.take(1)

    def add(self, blocks: Iterable[int], uses: Sequence[int]) -> None:
        """See `EvictionOrder.add`."""
        parents, children, worths, turns = self._parents, self._children, self._worth, self._turns
        floor, turn, first_cost, depth_cost = self._floor, self._turn, _UNITS, self.depth_cost
        is_spared = self._is_spared if self.spared else None
        for block in blocks:
            if (parent := parents[block]) >= 0:
                children[parent] += 1
            cost = int(first_cost * (1 + depth_cost * self._depths[block])) if depth_cost else first_cost
            many = uses[block]
            if many > MOST_USES or (is_spared and is_spared[block]):
                many = MOST_USES
            worths[block] = floor + many * cost
            turn += 1
            turns[block] = turn
            self._count += 1
            if not children[block]:
                self._push(block)
        self._turn = turn

    def places(self, count: int) -> int:
        """See `EvictionOrder.places`. A place has the floor and the turn in one number."""
        first = self._floor << _TURN_BITS | self._turn + 1
        self._turn += count
        return first

    def put_back(self, blocks: Sequence[int], places: Sequence[int], uses: Sequence[int]) -> None:
        """See `EvictionOrder.put_back`. The blocks get the worth that they would have got without the pin."""
        floor, turn = self._floor, self._turn
        for block, place in zip(blocks, places, strict=True):
            self._floor, self._turn = place >> _TURN_BITS, (place & _TURN_MASK) - 1
            self.add((block,), uses)
        self._floor, self._turn = floor, turn

    def spare(self, blocks: Iterable[int]) -> None:
        """Count these blocks, which are in use, as used `MOST_USES` times until they are evicted."""
        is_spared = self._is_spared
        for block in blocks:
            if not is_spared[block]:
                is_spared[block] = True
                self.spared += 1

    def is_spared(self, block: int) -> bool:
        """Whether `spare` was called for the content of this block."""
        return bool(self._is_spared[block])

    def remove(self, blocks: Iterable[int]) -> None:
        """See `EvictionOrder.remove`."""
        parents, children, worths = self._parents, self._children, self._worth
        for block in blocks:
            if (parent := parents[block]) >= 0:
                children[parent] -= 1
            worths[block] = _NOT_IDLE
            self._count -= 1

    def take(self, count: int) -> list[int]:
        """See `EvictionOrder.take`."""
        if count > self._count:
            raise IndexError("fewer blocks are idle")
        # This runs for each block that a request takes from a full pool, so even one call or one new heap entry costs
        # noticeable time. A chain is evicted from its end, so the next block is usually the parent of the last one, and
        # such a parent needs no heap entry.
        heap, worths, turns, parents, children = self._heap, self._worth, self._turns, self._parents, self._children
        floor, block, worth, blocks = self._floor, _NONE, 0, []
        for _ in range(count):
            if block == _NONE:
                while True:
                    entry = heappop(heap)
                    block = entry & _BLOCK_MASK
                    worth = worths[block]
                    if worth != _NOT_IDLE and entry >> _BLOCK_BITS & _TURN_MASK == turns[block]:
                        break
                top = heap[0] >> _BLOCK_BITS if heap else _LAST
                top_worth, top_turn = top >> _TURN_BITS, top & _TURN_MASK
            if worth > floor:
                floor = worth
            worths[block] = _NOT_IDLE
            blocks.append(block)
            parent, block = parents[block], _NONE
            if parent >= 0:
                left = children[parent] = children[parent] - 1
                if not left and (worth := worths[parent]) != _NOT_IDLE:
                    if worth < top_worth or (worth == top_worth and turns[parent] < top_turn):
                        block = parent
                    else:
                        heappush(heap, self._entry(parent))
        if block != _NONE:
            heappush(heap, self._entry(block))
        self._floor = floor
        self._count -= count
        if self.spared:
            self._unspare(blocks)
        return blocks

    def clear(self) -> None:
        """See `EvictionOrder.clear`."""
        total = len(self._worth)
        self._heap.clear()
        self._worth[:] = array("q", [_NOT_IDLE]) * total
        self._children[:] = array("i", bytes(4 * total))
        self._is_spared[:] = bytes(total)
        self._count = self.spared = 0

    def _unspare(self, blocks: Iterable[int]) -> None:
        """Spare these blocks no longer, because they were evicted."""
        is_spared = self._is_spared
        for block in blocks:
            self.spared -= is_spared[block]
            is_spared[block] = False

    def _is_current(self, entry: int, block: int) -> bool:
        return self._worth[block] != _NOT_IDLE and entry >> _BLOCK_BITS & _TURN_MASK == self._turns[block]

    def _entry(self, block: int) -> int:
        return (self._worth[block] << _TURN_BITS | self._turns[block]) << _BLOCK_BITS | block

    def _push(self, block: int) -> None:
        if len(self._heap) > 2 * self._count + _SLACK:
            self._heap = [entry for entry in self._heap if self._is_current(entry, entry & _BLOCK_MASK)]
            heapify(self._heap)
        heappush(self._heap, self._entry(block))
