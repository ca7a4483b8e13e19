"""The blocks of one ended request on their way one tier down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from engine.cache.prefix_cache import PrefixCache
from engine.cache.sequence import CachedSequence
from engine.contract.load import StepCost
from engine.tiers.copies.base import BlockPair, Direction, FinishedCopy
from engine.tiers.link import Link, leading


class Leaving:
    """Copies those blocks of a sequence that are worth copying, in pieces as large as is allowed at the time.

    It holds the sequence in `upper`, and `part` in the tier below: the same sequence, as far as it was copied.
    """

    def __init__(
        self,
        depth: int,
        link: Link,
        upper: PrefixCache,
        sequence: CachedSequence,
        *,
        has_room: bool,
        spoilt: AbstractSet[int],
        landed: Callable[[Leaving], None],
    ) -> None:
        """`depth`: of the link; `has_room`: whether anything may be copied; `spoilt`: blocks of `upper` that cannot be
        read; `landed`: called when a copy has ended."""
        self._landed, self._spoilt = landed, spoilt
        self.depth, self.link = depth, link
        self.sequence, self._upper = sequence, upper
        self.part: CachedSequence | None = None
        """None: copying has not begun."""
        self.lacked = self.worthless = 0
        """Blocks for which the tier below had no room, or which cannot be read; blocks that take less time to compute
        than to copy."""
        self.is_cut = False
        self._has_room = has_room
        self._asked = self._indexed = self._open = 0
        self._stop = len(sequence.nodes) if has_room else 0
        self._arrived: dict[int, int] = {}
        """For each piece that has ended: index of its first block -> index after its last block that arrived."""
        self._repairs: Sequence[BlockPair] = ()
        link.unasked += self.unasked

    def begin(self, cost: StepCost) -> None:
        """Decide what to copy. The blocks that the tier below already has count as used there. `cost`: tells how long a
        block takes to compute."""
        link, blocks = self.link, len(self.sequence.nodes)
        self.link.unasked -= self.unasked
        part = self.part = self.sequence.fork()
        there = self._asked = self._indexed = link.lower.hold_cached(part, blocks)
        wanted = max(there, link.worthwhile(self.sequence, cost))
        self.worthless = blocks - wanted
        self._stop = wanted if self._has_room else there
        self.lacked = wanted - self._stop
        self._repairs = link.repairs(self.sequence, part) if self._has_room else ()
        self.link.unasked += self.unasked

    @property
    def unasked(self) -> int:
        """Number of blocks whose copy has not begun."""
        return self._stop - self._asked + len(self._repairs)

    @property
    def is_asked(self) -> bool:
        """Whether all copies have begun, so that nothing is to be done before one has ended."""
        return self.part is not None and not self.unasked

    @property
    def is_over(self) -> bool:
        """Whether nothing more is copied."""
        return (self.is_cut or self.part is not None) and not self.unasked and not self._open

    def go_on(self, blocks: int) -> None:
        """Begin to copy at most `blocks` more blocks, which must be at least one."""
        assert self.part is not None
        before, start, lower = self.unasked, self._asked, self.link.lower
        repairs, self._repairs = self._repairs[:blocks], self._repairs[blocks:]
        stop = min(self._stop, start + blocks - len(repairs))
        if self._spoilt:  # what they hold is not what their digests say
            repairs = [pair for pair in repairs if pair.source not in self._spoilt]
            nodes = self.sequence.nodes
            if (readable := next((i for i in range(start, stop) if nodes[i] in self._spoilt), stop)) < stop:
                self.lacked += self._stop - readable
                stop = self._stop = readable
        if stop - start > lower.pool.available:
            self.lacked += self._stop - start - lower.pool.available
            stop = self._stop = start + lower.pool.available
        if stop > start:
            lower.extend(self.part, stop * lower.block_size)
            if not self.link.describe_all(self.part, start, stop):
                stop = self._stop = start
        self._asked = stop
        self.link.unasked -= before - self.unasked
        pairs = [*repairs, *self.link.pairs(self.sequence, self.part, start, stop)]
        if pairs:
            self._open += 1
            self.link.copy(Direction.DEMOTE, pairs, lambda end: self._land(start, pairs[len(repairs) :], end))

    def cut_short(self) -> None:
        """Begin no further copy."""
        self.link.unasked -= self.unasked
        self._stop, self._repairs, self.is_cut = self._asked, (), True

    def release(self) -> None:
        """Release the blocks in the tier above, once nothing more is copied. The caller releases `part`."""
        self._upper.release(self.sequence)

    def _land(self, start: int, pairs: Sequence[BlockPair], end: FinishedCopy) -> None:
        assert self.part is not None
        self._open -= 1
        self._arrived[start] = start + leading(pairs, end)
        before = at = self._indexed
        while (stop := self._arrived.pop(at, at)) > at:
            at = stop
        if at > before:
            self._indexed = at
            self.link.lower.commit(self.part, at * self.link.lower.block_size)
        if end.error is not None:
            self.cut_short()
        self._landed(self)
