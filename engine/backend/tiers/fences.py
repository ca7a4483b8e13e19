"""Which blocks and slots open copies read and write, and so what nobody else may do with them meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from engine.backend.tiers.base import BlockPair, Direction


class FenceError(Exception):
    """A defect of the caller: it would read what is being written, or write what is being read or written."""


class _Space:
    """The blocks of the pool, or the slots of the host tier."""

    def __init__(self, name: str, total: int) -> None:
        self.name = name
        self.total = total
        self.read: Counter[int] = Counter()
        """Open copies that read a place."""
        self.written: set[int] = set()

    def check_read(self, places: Iterable[int], what: str) -> None:
        for place in places:
            self._check_range(place, what)
            if place in self.written:
                raise FenceError(f"{what} reads {self.name} {place}, which an open copy still writes")

    def check_write(self, places: Iterable[int], what: str) -> None:
        for place in places:
            self._check_range(place, what)
            if place in self.written or place in self.read:
                verb = "writes" if place in self.written else "reads"
                raise FenceError(f"{what} writes {self.name} {place}, which an open copy still {verb}")

    def release_read(self, places: Iterable[int]) -> None:
        for place in places:
            self.read[place] -= 1
            if not self.read[place]:
                del self.read[place]

    def _check_range(self, place: int, what: str) -> None:
        if not 0 <= place < self.total:
            raise FenceError(f"{what} names {self.name} {place}; there are {self.total}")


class Fences:
    """Places of open copies, from the request for a copy until its caller has been told of its end."""

    def __init__(self, pool_blocks: int, host_slots: int) -> None:
        self._pool = _Space("pool block", pool_blocks)
        self._host = _Space("host slot", host_slots)

    def open(self, direction: Direction, pairs: Sequence[BlockPair]) -> None:
        """Fence the pairs of a copy. Raises FenceError, and fences none, where one conflicts with an open copy."""
        source, target = self._sides(direction)
        targets = {pair.target for pair in pairs}
        if len(targets) < len(pairs):
            raise FenceError(f"a {direction.value} writes the same {target.name} twice")
        source.check_read((pair.source for pair in pairs), f"a {direction.value}")
        target.check_write(targets, f"a {direction.value}")
        source.read.update(pair.source for pair in pairs)
        target.written |= targets

    def close(self, direction: Direction, pairs: Sequence[BlockPair]) -> None:
        """The copy of these pairs is over."""
        source, target = self._sides(direction)
        source.release_read(pair.source for pair in pairs)
        target.written.difference_update(pair.target for pair in pairs)

    def check_step(self, reads: Iterable[int], writes: Iterable[int]) -> None:
        """Raises FenceError where a step would read a pool block that a copy writes, or write one that a copy uses."""
        if self._pool.written or self._pool.read:
            self._pool.check_read(reads, "a step")
            self._pool.check_write(writes, "a step")

    def is_block_readable(self, block: int) -> bool:
        """Whether no open copy writes the pool block."""
        return block not in self._pool.written

    def is_block_idle(self, block: int) -> bool:
        """Whether no open copy uses the pool block: it may be written, freed or given to another."""
        return block not in self._pool.written and block not in self._pool.read

    def is_slot_readable(self, slot: int) -> bool:
        """Whether no open copy writes the host slot."""
        return slot not in self._host.written

    def is_slot_idle(self, slot: int) -> bool:
        """Whether no open copy uses the host slot: it may be written, freed or given to another."""
        return slot not in self._host.written and slot not in self._host.read

    def _sides(self, direction: Direction) -> tuple[_Space, _Space]:
        return (self._pool, self._host) if direction is Direction.DEMOTE else (self._host, self._pool)
