"""Chains of blocks that stay in the pool for a given time. This module has no clock: callers pass the time.

A pin adds a reference to each of its blocks, so a pinned block is a used one and is never in the order of eviction
(`DESIGN.md` beside this file, "The seam").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from engine.cache.block_pool import BlockPool
from engine.cache.indexed import NO_BLOCK, IndexedBlocks

_SLACK = 64
"""Entries of pins that are over, which the heap may have in addition to one for each pin."""


@dataclass(slots=True, eq=False)
class _Pin:
    """A pin of the chain that ends with block `end`."""

    end: int
    salt: bytes
    lifetime_s: float
    until_s: float
    is_over: bool = False


class Pins:
    """Pinned chains. A block is pinned while it is the end of a pinned chain, or while a pinned block follows it.

    Salts share the `most_blocks` blocks by max-min fairness. A single salt may have all of them. If another salt asks
    for some, the first salt gives back blocks until both have equally many.
    """

    def __init__(self, pool: BlockPool, indexed: IndexedBlocks, most_blocks: int, *, are_guesses: bool = False) -> None:
        """`most_blocks`: blocks that may be pinned at a time. `are_guesses`: a pin that runs out was a wrong guess, so
        its blocks are worth less than those that were never pinned."""
        self._pool = pool
        self._indexed = indexed
        self.most_blocks = most_blocks
        self._are_guesses = are_guesses
        self._following: dict[int, int] = {}
        """Pinned block -> number of pinned blocks that follow it directly."""
        self._ends: dict[int, _Pin] = {}
        self._held: Counter[bytes] = Counter()
        """Salt -> number of pinned blocks. All blocks of a chain have the same salt."""
        self._due: list[tuple[float, int, _Pin]] = []
        """A heap with an entry for each pin: the earliest time at which it may be over, and a number to break ties."""
        self._numbers = count()
        self.given_up = 0
        """Pins that ended or became shorter before their time for lack of blocks, since the start."""

    def __len__(self) -> int:
        """Number of pinned blocks."""
        return len(self._following)

    def __iter__(self) -> Iterator[int]:
        return iter(self._following)

    @property
    def spare(self) -> int:
        """Number of pinned blocks that have no other user. Looks at each pinned block."""
        references = self._pool.references
        return sum([references(block) == 1 for block in self._following])

    def blocks_of(self, salt: bytes) -> int:
        """Return the number of blocks that are pinned in chains of this salt."""
        return self._held[salt]

    def keep(self, chain: Sequence[int], lifetime_s: float, now_s: float, salt: bytes = b"") -> int:
        """Pin a chain from its first block on. Each of its blocks must be used and indexed now.

        Returns how many of its leading blocks are pinned: fewer than all if there is no room for more.
        """
        following = self._following
        first = next((i for i, block in enumerate(chain) if block not in following), len(chain))
        missing = len(following) + len(chain) - first - self.most_blocks
        if missing > 0:
            self._level(salt, missing)
        new = chain[first : first + max(0, self.most_blocks - len(following))]
        kept = first + len(new)
        if not kept:
            return 0
        self._pool.pin(new)
        for i, block in enumerate(new, start=first):
            following[block] = 0
            if i:
                following[chain[i - 1]] += 1
        self._held[salt] += len(new)
        self._end_at(chain[kept - 1], salt, lifetime_s, now_s)
        return kept

    def touch(self, nodes: Sequence[int], now_s: float) -> None:
        """Renew the time of each pin that ends at one of these blocks, because a request uses them."""
        ends = self._ends
        if not ends:
            return
        for node in nodes:
            pin = ends.get(node)
            if pin is not None:
                pin.until_s = max(pin.until_s, now_s + pin.lifetime_s)

    def end_at(self, block: int) -> None:
        """End the pin of the chain that ends with this block, if there is one."""
        pin = self._ends.get(block)
        if pin is not None:
            self._end(pin)

    def expire(self, now_s: float) -> None:
        """End the pins whose time is over."""
        while self._due and self._due[0][0] <= now_s:
            pin = heappop(self._due)[2]
            if pin.is_over:
                continue
            if pin.until_s > now_s:
                heappush(self._due, (pin.until_s, next(self._numbers), pin))
            else:
                self._end(pin, was_wanted=not self._are_guesses)

    def give_up(self, blocks: int) -> int:
        """Shorten pins, the soonest to end first, until `blocks` more blocks are available in the pool.

        Returns how many became available: fewer if all other pinned blocks have other users, too.
        """
        before = self._pool.available
        if blocks <= 0:
            return 0
        while True:
            found = self._pool.available
            for pin in self._soonest():
                if (missing := before + blocks - self._pool.available) <= 0:
                    break
                self.given_up += bool(self._shorten(pin, missing, spare_only=True))
            if self._pool.available == found or self._pool.available >= before + blocks:
                return self._pool.available - before

    def clear(self) -> None:
        """End all pins; their blocks are not indexed any more."""
        for pin in list(self._ends.values()):
            self._end(pin)
        self._due.clear()

    def _level(self, salt: bytes, missing: int) -> None:
        """Take up to `missing` blocks from the salts that have most. None may end up with fewer than `salt`."""
        others = [held for other, held in self._held.items() if other != salt]
        mine = self._held[salt] + self.most_blocks - len(self._following)  # with all that is free
        low, high = 0, max(others, default=0)
        while low < high:  # find the least number of blocks to which the others can be cut
            height = (low + high) // 2
            cut = sum([held - height for held in others if held > height])
            if cut <= missing and mine + cut <= height:
                high = height
            else:
                low = height + 1
        goals = {other: low for other, held in self._held.items() if other != salt and held > low}
        cut = sum([self._held[other] - low for other in goals])
        # Cutting all of them by one more block would be too much, but some of them may have to give one more.
        one_more = sorted(other for other, held in self._held.items() if other != salt and held >= low)
        for other in one_more[: max(0, min(missing - cut, low - 1 - mine - cut))]:
            goals[other] = low - 1
        for other, goal in goals.items():
            self._cut(other, self._held[other] - goal)

    def _cut(self, salt: bytes, blocks: int) -> None:
        """Drop `blocks` of the salt's pinned blocks from the ends of its chains. Pins that end soonest go first."""
        goal = self._held[salt] - blocks
        while self._held[salt] > goal:
            for pin in self._soonest(salt):
                if (left := self._held[salt] - goal) <= 0:
                    break
                self.given_up += bool(self._shorten(pin, left))

    def _soonest(self, salt: bytes | None = None) -> list[_Pin]:
        """Return the pins (of this salt, if one is given), the soonest to end first."""
        pins = [pin for pin in self._ends.values() if salt is None or pin.salt == salt]
        return sorted(pins, key=lambda pin: pin.until_s)

    def _end_at(self, end: int, salt: bytes, lifetime_s: float, now_s: float) -> None:
        until_s = now_s + lifetime_s
        pin = self._ends.get(end)
        if pin is not None:
            pin.until_s = max(pin.until_s, until_s)
            pin.lifetime_s = max(pin.lifetime_s, lifetime_s)
            return
        pin = self._ends[end] = _Pin(end, salt, lifetime_s, until_s)
        heappush(self._due, (until_s, next(self._numbers), pin))

    def _shorten(self, pin: _Pin, most: int, *, spare_only: bool = False) -> int:
        """Drop the last blocks of the pin, at most `most` and none that another pin covers; return how many.

        `spare_only`: also none that has another user. From then on the pin covers the rest of the chain. If nothing is
        left, the pin is over.
        """
        if pin.is_over:
            return 0
        block, dropped = self._drop(pin, most, spare_only=spare_only)
        other = self._ends.get(block)
        if block == NO_BLOCK or other is not None:
            pin.is_over = True
        if other is not None:
            other.until_s = max(other.until_s, pin.until_s)
            other.lifetime_s = max(other.lifetime_s, pin.lifetime_s)
        elif block != NO_BLOCK:
            pin.end = block
            self._ends[block] = pin
        self._tidy()
        return dropped

    def _end(self, pin: _Pin, *, was_wanted: bool = True) -> None:
        """Drop the blocks that no other pin covers, from the last to the first."""
        pin.is_over = True
        self._drop(pin, len(self._following), was_wanted=was_wanted)
        self._tidy()

    def _tidy(self) -> None:
        """Forget the heap's entries of pins that are over, if there are too many."""
        if len(self._due) > 2 * len(self._ends) + _SLACK:
            self._due = [(pin.until_s, number, pin) for _, number, pin in self._due if not pin.is_over]
            self._due.sort()

    def _drop(self, pin: _Pin, most: int, *, was_wanted: bool = True, spare_only: bool = False) -> tuple[int, int]:
        """Drop the pin's last blocks, at most `most` and none that another pin covers; take its end out of `_ends`.

        Returns the block before the dropped ones, and their number. `spare_only`: see `_shorten`.
        """
        del self._ends[pin.end]
        dropped: list[int] = []
        block, following, references = pin.end, self._following, self._pool.references
        while block != NO_BLOCK and len(dropped) < most and not following[block] and block not in self._ends:
            if spare_only and references(block) > 1:
                break
            del following[block]
            dropped.append(block)
            block = self._indexed.parents[block]
            if block != NO_BLOCK:
                following[block] -= 1
        digests = self._indexed.digests
        keep = [digests[block] is not None for block in dropped]
        self._pool.drop_references(dropped, keep, is_pin=True, was_wanted=was_wanted)
        self._held[pin.salt] -= len(dropped)
        if not self._held[pin.salt]:
            del self._held[pin.salt]
        return block, len(dropped)
