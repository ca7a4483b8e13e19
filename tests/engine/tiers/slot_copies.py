"""Copies between two models of memory (`CheckingBackend.slots`): the test decides when each run ends, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.cache.prefix_cache import PrefixCache
from engine.tiers.copies.base import BlockRun, Direction, EndedJob, Moved

BLOCK_BYTES = 10
Memory = dict[int, Any]


@dataclass(eq=False)
class Flying:
    """A run in flight. The content of its target is invalid until the run ends."""

    run: BlockRun
    before: list[Any]
    has_ended: bool = False
    fails: bool = False


@dataclass
class FlyingJob:
    """A job, which ends with the last of its runs."""

    runs: list[Flying]

    def ended(self) -> EndedJob | None:
        if not all(flying.has_ended for flying in self.runs):
            return None
        return EndedJob(Moved(0, 0.0), ["the medium is broken" if flying.fails else None for flying in self.runs])


@dataclass
class SlotCopies:
    """Copies that fail a test if either side of a run is written while the run is in flight."""

    upper: Memory
    lower: Memory
    upper_cache: PrefixCache
    lower_cache: PrefixCache
    block_bytes: int = BLOCK_BYTES
    flying: list[Flying] = field(default_factory=list)

    @property
    def pool_blocks(self) -> int:
        return self.upper_cache.pool.total

    @property
    def host_slots(self) -> int:
        return self.lower_cache.pool.total

    def start(self, job: Sequence[BlockRun]) -> FlyingJob:
        return FlyingJob([self._begin(run) for run in job])

    def _begin(self, run: BlockRun) -> Flying:
        source, target = self.sides(run)
        flying = Flying(run, [source[pair.source] for pair in run.pairs])
        for pair in run.pairs:
            target[pair.target] = flying
        self.flying.append(flying)
        return flying

    def sides(self, run: BlockRun) -> tuple[Memory, Memory]:
        return (self.upper, self.lower) if run.direction is Direction.DEMOTE else (self.lower, self.upper)

    def end(self, flying: Flying, *, fails: bool = False) -> None:
        self.flying.remove(flying)
        source, target = self.sides(flying.run)
        caches = (self.upper_cache, self.lower_cache)
        from_, to = caches if flying.run.direction is Direction.DEMOTE else reversed(caches)
        for pair, before in zip(flying.run.pairs, flying.before, strict=True):
            assert source[pair.source] is before, "a source was written during its copy"
            assert target[pair.target] is flying, "a target was written during its copy"
            assert from_.pool.references(pair.source), "a source was freed during its copy"
            assert to.pool.references(pair.target), "a target was freed during its copy"
            if not fails:
                target[pair.target] = list(before)
        flying.has_ended, flying.fails = True, fails

    def end_all(self) -> None:
        while self.flying:
            self.end(self.flying[0])
