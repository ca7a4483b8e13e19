"""Tracks the blocks and slots that open copies read and write, so that nobody else uses them in a conflicting way."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from engine.tiers.copies.base import BlockPair, Direction


class FenceError(Exception):
    """A defect of the caller: it would read a block being written, or write a block being read or written."""


class _Space:
    """The blocks of the pool, or the slots of the host tier."""

    def __init__(self, name: str, total: int) -> None:
        self.name = name
        self.total = total
        self.read: dict[int, int] = {}
        """Place -> number of open copies that read it."""
        self.written: set[int] = set()

    def check_read(self, places: Collection[int], what: str) -> None:
        self._check_range(places, what)
        if not self.written.isdisjoint(places):
            place = next(place for place in places if place in self.written)
            raise FenceError(f"{what} reads {self.name} {place}, which an open copy still writes")

    def check_write(self, places: Collection[int], what: str) -> None:
        self._check_range(places, what)
        if not (self.written.isdisjoint(places) and self.read.keys().isdisjoint(places)):
            place = next(place for place in places if place in self.written or place in self.read)
            verb = "writes" if place in self.written else "reads"
            raise FenceError(f"{what} writes {self.name} {place}, which an open copy still {verb}")

    def begin_read(self, places: Iterable[int]) -> None:
        read = self.read
        for place in places:
            read[place] = read.get(place, 0) + 1

    def release_read(self, places: Iterable[int]) -> None:
        read = self.read
        for place in places:
            left = read.pop(place) - 1
            if left:
                read[place] = left

    def _check_range(self, places: Collection[int], what: str) -> None:
        if places and not (min(places) >= 0 and max(places) < self.total):
            place = next(place for place in places if not 0 <= place < self.total)
            raise FenceError(f"{what} names {self.name} {place}; there are {self.total}")


class Fences:
    """The blocks and slots of open copies, from the request for a copy until its end is reported."""

    def __init__(self, pool_blocks: int, host_slots: int) -> None:
        self._pool = _Space("pool block", pool_blocks)
        self._host = _Space("host slot", host_slots)

    def open(self, direction: Direction, pairs: Sequence[BlockPair]) -> None:
        """Fence the pairs of a copy. Raises FenceError, and fences none, if a pair conflicts with an open copy."""
        source, target = self._sides(direction)
        sources = [place for place, _ in pairs]
        targets = {place for _, place in pairs}
        if len(targets) < len(pairs):
            raise FenceError(f"a {direction.value} writes the same {target.name} twice")
        source.check_read(sources, f"a {direction.value}")
        target.check_write(targets, f"a {direction.value}")
        source.begin_read(sources)
        target.written |= targets

    def close(self, direction: Direction, pairs: Sequence[BlockPair]) -> None:
        """Drop the fences of an ended copy."""
        source, target = self._sides(direction)
        source.release_read([place for place, _ in pairs])
        target.written.difference_update([place for _, place in pairs])

    def check_step(self, reads: Collection[int], writes: Collection[int]) -> None:
        """Raise FenceError if a step would read a pool block that a copy writes, or write one that a copy uses."""
        if self._pool.written or self._pool.read:
            self._pool.check_read(reads, "a step")
            self._pool.check_write(writes, "a step")

    def is_block_readable(self, block: int) -> bool:
        """Return whether no open copy writes the pool block."""
        return block not in self._pool.written

    def is_block_idle(self, block: int) -> bool:
        """Return whether no open copy uses the pool block, so it may be written, freed or reused."""
        return block not in self._pool.written and block not in self._pool.read

    def is_slot_readable(self, slot: int) -> bool:
        """Return whether no open copy writes the host slot."""
        return slot not in self._host.written

    def is_slot_idle(self, slot: int) -> bool:
        """Return whether no open copy uses the host slot, so it may be written, freed or reused."""
        return slot not in self._host.written and slot not in self._host.read

    def _sides(self, direction: Direction) -> tuple[_Space, _Space]:
        return (self._pool, self._host) if direction is Direction.DEMOTE else (self._host, self._pool)
