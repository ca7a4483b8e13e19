"""A copy engine without memory or time of its own: the test decides when a run ends, and how."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.backend.tiers.base import BlockRun, CopyError, Direction

BLOCK_BYTES = 10
BLOCK_S = 0.5
"""Seconds that the engine says each block took."""


@dataclass(eq=False)
class ScriptedRun:
    """A run in flight. Its target is torn from the start to the end; its source is read at the end."""

    run: BlockRun
    before: list[object]
    took_s: float | None = None
    failed: bool = False

    def elapsed_s(self) -> float | None:
        if self.failed:
            raise CopyError("the link is down")
        return self.took_s


@dataclass
class ScriptedEngine:
    """Both memories as lists of values, and the runs in flight."""

    pool_blocks: int
    host_slots: int
    block_bytes: int = BLOCK_BYTES
    in_flight: list[ScriptedRun] = field(default_factory=list)
    started: list[BlockRun] = field(default_factory=list)
    refuses: bool = False

    def __post_init__(self) -> None:
        self.pool: list[object] = [f"pool {i}" for i in range(self.pool_blocks)]
        self.host: list[object] = [f"host {i}" for i in range(self.host_slots)]

    def start(self, run: BlockRun) -> ScriptedRun:
        if self.refuses:
            raise CopyError("the link is down")
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
        """The run ends now. Nobody may have written either side while it ran."""
        source, target = self.sides(flying.run)
        assert [source[p.source] for p in flying.run.pairs] == flying.before, "a source was written under a copy"
        assert all(target[p.target] is flying for p in flying.run.pairs), "a target was written under a copy"
        if not fails:
            for pair, value in zip(flying.run.pairs, flying.before, strict=True):
                target[pair.target] = value
        flying.failed, flying.took_s = fails, flying.run.blocks * BLOCK_S
        self.in_flight.remove(flying)

    def end_all(self) -> None:
        for flying in list(self.in_flight):
            self.end(flying)
