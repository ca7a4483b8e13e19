"""In which order idle blocks are evicted. Every order is leaf-first: a block goes before the block that it follows.

That holds because the cache releases a block before its parent, and because whoever uses a block uses its parents: so a
parent has been used at least as often, at least as late, and its idle children were added before it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from heapq import heapify, heappop, heappush, heappushpop
from typing import Protocol

MOST_USES = 15
"""Uses that count. A block that nobody asks for again outlives so many times the blocks that were used once."""
MOST_DEPTH_COST = 1.0
"""Of `GreedyDual.depth_cost`: a fit that went astray must not make one chain outlive everything."""
_NOT_IDLE = -1
_SLACK = 1024
"""Outdated entries that a heap may have beside as many as there are idle blocks."""
_UNITS = 4096
"""Parts of the cost of a chain's first block: what costs are rounded down to."""
_BLOCK_BITS, _TURN_BITS = 32, 48
_BLOCK_MASK, _TURN_MASK = (1 << _BLOCK_BITS) - 1, (1 << _TURN_BITS) - 1


class Eviction(StrEnum):
    """Which idle block goes first."""

    LRU = "lru"
    """The longest unused."""
    LFU = "lfu"
    """The least often used, where uses fade as other blocks are evicted."""
    COST = "cost"
    """The cheapest to compute again, times its uses; both fade likewise."""


class EvictionOrder(Protocol):
    """Idle blocks in the order of their eviction. Has no clock: the order of the calls is the time."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]:
        """From the next one to the last. Takes the time of a sort: for tests."""
        ...

    def add(self, blocks: Iterable[int], uses: Sequence[int]) -> None:
        """The blocks have become idle, in this order: a block after all indexed blocks behind it.

        `uses`: by block, the requests to which what it holds was common.
        """
        ...

    def remove(self, blocks: Iterable[int]) -> None:
        """The blocks are used again, a block after those before it in its chain."""
        ...

    def pop(self) -> int:
        """Take out the next one. Raises IndexError where there is none."""
        ...

    def clear(self) -> None:
        """No block is idle."""
        ...


class LeastRecentlyUsed:
    """The longest unused block first; every operation O(1)."""

    def __init__(self) -> None:
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def __iter__(self) -> Iterator[int]:
        return iter(self._idle)

    def add(self, blocks: Iterable[int], uses: Sequence[int]) -> None:
        """The blocks have become idle, in this order."""
        idle = self._idle
        for block in blocks:
            idle[block] = None

    def remove(self, blocks: Iterable[int]) -> None:
        """The blocks are used again."""
        idle = self._idle
        for block in blocks:
            del idle[block]

    def pop(self) -> int:
        """Take out the next one. Raises IndexError where there is none."""
        if not self._idle:
            raise IndexError("no block is idle")
        return self._idle.popitem(last=False)[0]

    def clear(self) -> None:
        """No block is idle."""
        self._idle.clear()


class GreedyDual:
    """The least worth first, where a block's worth is `floor + uses * cost` and the floor is the worth last evicted.

    That is GreedyDual-Size-Frequency (Cherkasova, "Improving WWW Proxies Performance with GDSF Caching Policy", 1998)
    with blocks of one size. As the floor rises, what was worth much long ago becomes worth little beside what is new.

    The cost of a chain's block n is `1 + depth_cost * n`: attention makes later blocks dearer to compute.
    A block can be worth less than its children; it goes after them all the same. So only blocks without idle children
    are in the heap, and each operation takes O(log blocks).
    """

    def __init__(self, parents: Sequence[int], depths: Sequence[int], *, depth_cost: float = 0.0) -> None:
        """`parents`: by block, the block before it in its chain or a negative number; `depths`: blocks before it."""
        total = len(parents)
        self._parents = parents
        self._depths = depths
        self.depth_cost = depth_cost
        """Cost of a block more for each block before it, in parts of the cost of a chain's first block."""
        self._children = array("i", bytes(4 * total))
        """Idle children. All indexed children of an idle block are idle."""
        self._worth = array("q", [_NOT_IDLE]) * total
        """In units; of idle blocks."""
        self._turns = array("q", bytes(8 * total))
        """When the block became idle: a heap's entry of another turn is outdated."""
        self._turn = 0
        self._floor = 0
        self._count = 0
        self._heap: list[int] = []
        """Blocks without idle children: worth, turn and block in one number, as the garbage collector walks none."""
        self._candidate: int | None = None
        """An entry that belongs into the heap: a chain goes from its end, so it is mostly the next one to go."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        twin = GreedyDual(self._parents, self._depths)
        for name in ("_children", "_worth", "_turns", "_heap"):
            setattr(twin, name, getattr(self, name)[:])
        twin._turn, twin._floor, twin._count = self._turn, self._floor, self._count
        twin._candidate = self._candidate
        while twin._count:
            yield twin.pop()

    def add(self, blocks: Iterable[int], uses: Sequence[int]) -> None:
        """The blocks have become idle, in this order: a block after all indexed blocks behind it."""
        parents, children, worths, turns = self._parents, self._children, self._worth, self._turns
        floor, turn, first_cost, depth_cost = self._floor, self._turn, _UNITS, self.depth_cost
        for block in blocks:
            if (parent := parents[block]) >= 0:
                children[parent] += 1
            cost = int(first_cost * (1 + depth_cost * self._depths[block])) if depth_cost else first_cost
            many = uses[block]
            worths[block] = floor + (many if many < MOST_USES else MOST_USES) * cost
            turn += 1
            turns[block] = turn
            self._count += 1
            if not children[block]:
                self._push(block)
        self._turn = turn

    def remove(self, blocks: Iterable[int]) -> None:
        """The blocks are used again, a block after those before it in its chain."""
        parents, children, worths = self._parents, self._children, self._worth
        for block in blocks:
            if (parent := parents[block]) >= 0:
                children[parent] -= 1
            worths[block] = _NOT_IDLE
            self._count -= 1

    def pop(self) -> int:
        """Take out the next one. Raises IndexError where there is none."""
        # Once for each block that a request takes from a full pool: calls of `_is_current` and `_entry` would show.
        heap, worths, turns = self._heap, self._worth, self._turns
        candidate, self._candidate = self._candidate, None
        while True:
            if candidate is not None:
                entry, candidate = heappushpop(heap, candidate), None
            elif heap:
                entry = heappop(heap)
            else:
                raise IndexError("no block is idle")
            block = entry & _BLOCK_MASK
            worth = worths[block]
            if worth != _NOT_IDLE and entry >> _BLOCK_BITS & _TURN_MASK == turns[block]:
                break
        if worth > self._floor:
            self._floor = worth
        worths[block] = _NOT_IDLE
        self._count -= 1
        if (parent := self._parents[block]) >= 0:
            children = self._children
            left = children[parent] = children[parent] - 1
            if not left and (worth := worths[parent]) != _NOT_IDLE:
                self._candidate = (worth << _TURN_BITS | turns[parent]) << _BLOCK_BITS | parent
        return block

    def clear(self) -> None:
        """No block is idle."""
        total = len(self._worth)
        self._heap.clear()
        self._candidate = None
        self._worth[:] = array("q", [_NOT_IDLE]) * total
        self._children[:] = array("i", bytes(4 * total))
        self._count = 0

    def _is_current(self, entry: int, block: int) -> bool:
        return self._worth[block] != _NOT_IDLE and entry >> _BLOCK_BITS & _TURN_MASK == self._turns[block]

    def _entry(self, block: int) -> int:
        return (self._worth[block] << _TURN_BITS | self._turns[block]) << _BLOCK_BITS | block

    def _push(self, block: int) -> None:
        if len(self._heap) > 2 * self._count + _SLACK:
            self._heap = [entry for entry in self._heap if self._is_current(entry, entry & _BLOCK_MASK)]
            heapify(self._heap)
        heappush(self._heap, self._entry(block))
