"""A copy engine without its own memory or time: the test decides when a run ends, and how. A job ends with its last
run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.tiers.copies.base import BlockRun, CopyError, Direction, EndedJob, Moved

BLOCK_BYTES = 10
BLOCK_S = 0.5
"""Seconds that the engine reports for each block."""


@dataclass(eq=False)
class ScriptedRun:
    """A run in flight. Its target is invalid until the end; its source is read at the end."""

    run: BlockRun
    before: list[object]
    has_ended: bool = False
    failed: bool = False


@dataclass
class ScriptedJob:
    """The runs of a job."""

    runs: list[ScriptedRun]

    def ended(self) -> EndedJob | None:
        if not all(flying.has_ended for flying in self.runs):
            return None
        moved = sum(flying.run.blocks for flying in self.runs if not flying.failed)
        errors = ["the link is down" if flying.failed else None for flying in self.runs]
        return EndedJob(Moved(moved, moved * BLOCK_S), errors)


@dataclass
class ScriptedEngine:
    """Both memories as lists of values, and the runs in flight."""

    pool_blocks: int
    host_slots: int
    block_bytes: int = BLOCK_BYTES
    in_flight: list[ScriptedRun] = field(default_factory=list)
    started: list[BlockRun] = field(default_factory=list)
    jobs: list[Sequence[BlockRun]] = field(default_factory=list)
    refuses: bool = False

    def __post_init__(self) -> None:
        self.pool: list[object] = [f"pool {i}" for i in range(self.pool_blocks)]
        self.host: list[object] = [f"host {i}" for i in range(self.host_slots)]

    def start(self, job: Sequence[BlockRun]) -> ScriptedJob:
        if self.refuses:
            raise CopyError("the link is down")
        self.jobs.append(job)
        return ScriptedJob([self._begin(run) for run in job])

    def _begin(self, run: BlockRun) -> ScriptedRun:
        source, target = self.sides(run)
        flying = ScriptedRun(run, [source[p.source] for p in run.pairs])
        for pair in run.pairs:
            target[pair.target] = flying
        self.started.append(run)
        self.in_flight.append(flying)
        return flying

    def sides(self, run: BlockRun) -> tuple[list[object], list[object]]:
        return (self.pool, self.host) if run.direction is Direction.DEMOTE else (self.host, self.pool)

    def end(self, flying: ScriptedRun, *, fails: bool = False) -> None:
        """End the run now. Fails if anybody wrote either side during the run."""
        source, target = self.sides(flying.run)
        assert [source[p.source] for p in flying.run.pairs] == flying.before, "a source was written during its copy"
        assert all(target[p.target] is flying for p in flying.run.pairs), "a target was written during its copy"
        if not fails:
            for pair, value in zip(flying.run.pairs, flying.before, strict=True):
                target[pair.target] = value
        flying.has_ended, flying.failed = True, fails
        self.in_flight.remove(flying)

    def end_all(self) -> None:
        for flying in list(self.in_flight):
            self.end(flying)
