"""Blocks that stay for a while whatever happens: ends of chains, each with a time. Has no clock: the time is told.

A pinned block is a used one: it has one reference more. So no order of eviction knows of pins (README "The seam").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from engine.cache.block_pool import BlockPool
from engine.cache.indexed import NO_BLOCK, IndexedBlocks

_SLACK = 64
"""Entries of pins that are over, beside as many as there are pins."""


@dataclass(slots=True, eq=False)
class _Pin:
    """Of a chain up to and with block `end`."""

    end: int
    lifetime_s: float
    until_s: float
    is_asked: bool
    is_over: bool = False


class Pins:
    """Pinned chains. A block is pinned while it is the end of one, or while a pinned block follows it."""

    def __init__(self, pool: BlockPool, indexed: IndexedBlocks, most_blocks: int) -> None:
        """`most_blocks`: that may be pinned at a time. Those that nobody asked for have half of it."""
        self._pool = pool
        self._indexed = indexed
        self._most_blocks = most_blocks
        self._following: dict[int, int] = {}
        """Of each pinned block, how many pinned blocks follow it directly."""
        self._ends: dict[int, _Pin] = {}
        self._due: list[tuple[float, int, _Pin]] = []
        """A heap with one entry for each end, with a time at which it is not over before, and a number for ties."""
        self._numbers = count()
        self.given_up = 0
        """Pins that ended before their time, for want of blocks, since the start."""

    def __len__(self) -> int:
        """Blocks that are pinned."""
        return len(self._following)

    def __iter__(self) -> Iterator[int]:
        return iter(self._following)

    def keep(self, chain: Sequence[int], lifetime_s: float, now_s: float, *, is_asked: bool = True) -> int:
        """Pin a chain, from its first block on; every block of it is used and indexed at the moment.

        Returns how many of its leading blocks are pinned: fewer where that is all that there is room for.
        """
        following = self._following
        first = next((i for i, block in enumerate(chain) if block not in following), len(chain))
        limit = self._most_blocks if is_asked else self._most_blocks // 2
        if is_asked and len(following) + len(chain) - first > limit:
            self.give_up(len(following) + len(chain) - first - limit, only_unasked=True)
            first = next((i for i, block in enumerate(chain) if block not in following), len(chain))
        new = chain[first : first + max(0, limit - len(following))]
        kept = first + len(new)
        if not kept:
            return 0
        self._pool.add_references(new)
        for i, block in enumerate(new, start=first):
            following[block] = 0
            if i:
                following[chain[i - 1]] += 1
        self._end_at(chain[kept - 1], lifetime_s, now_s, is_asked=is_asked)
        return kept

    def touch(self, nodes: Sequence[int], now_s: float) -> None:
        """A request uses these blocks: what is pinned up to one of them is kept for as long again."""
        ends = self._ends
        if not ends:
            return
        for node in nodes:
            pin = ends.get(node)
            if pin is not None:
                pin.until_s = max(pin.until_s, now_s + pin.lifetime_s)

    def expire(self, now_s: float) -> None:
        """End the pins whose time is over."""
        while self._due and self._due[0][0] <= now_s:
            pin = heappop(self._due)[2]
            if pin.is_over:
                continue
            if pin.until_s > now_s:
                heappush(self._due, (pin.until_s, next(self._numbers), pin))
            else:
                self._end(pin)

    def give_up(self, blocks: int, *, only_unasked: bool = False) -> bool:
        """End pins, those that nobody asked for first and else the soonest to end, until so many blocks fewer are
        pinned. False: none could be ended."""
        goal = len(self._following) - blocks
        pins = sorted(self._ends.values(), key=lambda pin: (pin.is_asked, pin.until_s))
        any_ended = False
        for pin in pins:
            if len(self._following) <= goal or (only_unasked and pin.is_asked):
                break
            self._end(pin)
            self.given_up += 1
            any_ended = True
        return any_ended

    def clear(self) -> None:
        """End all of them; the blocks are indexed no more."""
        for pin in list(self._ends.values()):
            self._end(pin)
        self._due.clear()

    def _end_at(self, end: int, lifetime_s: float, now_s: float, *, is_asked: bool) -> None:
        until_s = now_s + lifetime_s
        pin = self._ends.get(end)
        if pin is not None:
            pin.until_s = max(pin.until_s, until_s)
            pin.lifetime_s = max(pin.lifetime_s, lifetime_s)
            pin.is_asked |= is_asked
            return
        pin = self._ends[end] = _Pin(end, lifetime_s, until_s, is_asked)
        heappush(self._due, (until_s, next(self._numbers), pin))

    def _end(self, pin: _Pin) -> None:
        """Drop the blocks that no other pin covers, from the last to the first."""
        pin.is_over = True
        del self._ends[pin.end]
        dropped = []
        block, following = pin.end, self._following
        while block != NO_BLOCK and not following[block] and block not in self._ends:
            del following[block]
            dropped.append(block)
            block = self._indexed.parents[block]
            if block != NO_BLOCK:
                following[block] -= 1
        digests = self._indexed.digests
        self._pool.drop_references(dropped, [digests[block] is not None for block in dropped])
        if len(self._due) > 2 * len(self._ends) + _SLACK:
            self._due = [(pin.until_s, number, pin) for _, number, pin in self._due if not pin.is_over]
            self._due.sort()
