"""Random steps and copies that end in any order, against dicts. Every copy moves its source's content, and touches
nothing that a step or another copy still uses."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from engine.tiers.copies.base import BlockPair, Direction, FinishedCopy
from engine.tiers.copies.copier import BlockCopier, CopyLimits
from engine.tiers.copies.fences import FenceError
from tests.engine.cuda.copies.copy_script import BLOCK_BYTES, ScriptedEngine, ScriptedRun

BLOCKS, SLOTS = 7, 6
LIMITS = CopyLimits(job_bytes=2 * BLOCK_BYTES, in_flight_bytes=3 * BLOCK_BYTES)
pool_ids = st.integers(0, BLOCKS - 1)
slot_ids = st.integers(0, SLOTS - 1)
demotions = st.lists(st.builds(BlockPair, pool_ids, slot_ids), min_size=1, max_size=4)
promotions = st.lists(st.builds(BlockPair, slot_ids, pool_ids), min_size=1, max_size=4)
directions = st.sampled_from(Direction)


@dataclass
class Step:
    """A step in flight: its writes are invalid until it ends."""

    number: int
    reads: set[int]
    writes: dict[int, object]


class Copies(RuleBasedStateMachine):
    """The caller: it launches steps, requests copies, and relies on the results of `poll`."""

    copies = Bundle("copies")

    def __init__(self) -> None:
        super().__init__()
        self.engine = ScriptedEngine(BLOCKS, SLOTS)
        self.copier = BlockCopier(self.engine, clock=lambda: 0.0, limits=LIMITS)
        self.believed = {Direction.DEMOTE: dict(enumerate(self.engine.pool))}
        """Direction that reads -> place -> content after all steps and copies have ended."""
        self.believed[Direction.PROMOTE] = dict(enumerate(self.engine.host))
        self.steps: list[Step] = []
        self.launched = 0
        self.last_use = dict.fromkeys(range(BLOCKS), 0)
        self.open: dict[int, tuple[Direction, list[BlockPair], list[object]]] = {}

    @rule(reads=st.sets(pool_ids, max_size=3), writes=st.sets(pool_ids, max_size=2))
    def launch_step(self, reads: set[int], writes: set[int]) -> None:
        being_written = self._used(Direction.PROMOTE, 1)
        legal = not (reads | writes) & being_written and not writes & self._used(Direction.DEMOTE, 0)
        if not legal:
            with pytest.raises(FenceError):
                self.copier.fences.check_step(reads, writes)
            return
        self.copier.fences.check_step(reads, writes)
        self.launched += 1
        step = Step(self.launched, reads, dict.fromkeys(writes, f"step {self.launched}"))
        for block in reads | writes:
            self.last_use[block] = step.number
        self.believed[Direction.DEMOTE].update(step.writes)
        for block in writes:
            self.engine.pool[block] = step
        self.steps.append(step)

    @rule()
    def end_step(self) -> None:
        if self.steps:
            step = self.steps.pop(0)
            pending = {block for other in self.steps for block in other.writes}
            for block in step.writes.keys() - pending:
                self.engine.pool[block] = step.writes[block]
            self.copier.step_ended(step.number)

    @rule(target=copies, pairs=demotions)
    def demote(self, pairs: list[BlockPair]) -> object:
        return self._request(Direction.DEMOTE, pairs, max(self.last_use.get(p.source, 0) for p in pairs))

    @rule(target=copies, pairs=promotions)
    def promote(self, pairs: list[BlockPair]) -> object:
        return self._request(Direction.PROMOTE, pairs, max(self.last_use.get(p.target, 0) for p in pairs))

    @rule(copy=consumes(copies))
    def cancel(self, copy: int) -> None:
        if copy in self.open:
            self.copier.cancel(copy)

    @rule(which=st.integers(0, 20), fails=st.integers(0, 9))
    def end_run(self, which: int, fails: int) -> None:
        if self.engine.in_flight:
            self.engine.end(self.engine.in_flight[which % len(self.engine.in_flight)], fails=fails == 0)

    @rule()
    def poll(self) -> None:
        for finished in self.copier.poll():
            self._check(finished)

    @invariant()
    def nothing_touches_what_a_step_uses(self) -> None:
        for flying in self.engine.in_flight:
            demotes = flying.run.direction is Direction.DEMOTE
            for step in self.steps:
                used = step.writes.keys() if demotes else step.writes.keys() | step.reads
                mine = {p.source if demotes else p.target for p in flying.run.pairs}
                assert not used & mine, (flying.run, step)

    @invariant()
    def in_flight_is_bounded(self) -> None:
        for direction in Direction:
            in_flight = self.copier.in_flight_bytes(direction)
            assert in_flight <= LIMITS.in_flight_bytes
            assert in_flight >= sum(f.run.blocks for f in self.engine.in_flight if f.run.direction is direction) * 10

    @invariant()
    def idle_is_what_no_open_copy_uses(self) -> None:
        fences = self.copier.fences
        block_writers, block_readers = self._used(Direction.PROMOTE, 1), self._used(Direction.DEMOTE, 0)
        slot_writers, slot_readers = self._used(Direction.DEMOTE, 1), self._used(Direction.PROMOTE, 0)
        assert {b for b in range(BLOCKS) if not fences.is_block_readable(b)} == block_writers
        assert {b for b in range(BLOCKS) if not fences.is_block_idle(b)} == block_writers | block_readers
        assert {s for s in range(SLOTS) if not fences.is_slot_readable(s)} == slot_writers
        assert {s for s in range(SLOTS) if not fences.is_slot_idle(s)} == slot_writers | slot_readers

    def teardown(self) -> None:
        """Check that all copies end, each once, and leave no fence."""
        while self.steps:
            self.end_step()
        for _ in range(1000):
            if not self.open:
                break
            self.engine.end_all()
            self.poll()
        assert not self.open
        assert self.copier.open_copies == 0
        assert self.copier.poll() == []
        assert all(self.copier.in_flight_bytes(direction) == 0 for direction in Direction)
        self.idle_is_what_no_open_copy_uses()
        for direction in Direction:
            assert self.copier.seconds_for(direction, 0) in (None, 0.0)

    def _request(self, direction: Direction, pairs: list[BlockPair], after_step: int) -> object:
        other = Direction.PROMOTE if direction is Direction.DEMOTE else Direction.DEMOTE
        sources, targets = {p.source for p in pairs}, {p.target for p in pairs}
        taken = self._used(direction, 1) | self._used(other, 0)
        legal = len(targets) == len(pairs) and not targets & taken and not sources & self._used(other, 1)
        ask = self.copier.demote if direction is Direction.DEMOTE else self.copier.promote
        if not legal:
            with pytest.raises(FenceError):
                ask(pairs, after_step=after_step)
            return multiple()
        copy = ask(pairs, after_step=after_step)
        self.open[copy] = (direction, pairs, [self.believed[direction][p.source] for p in pairs])
        return copy

    def _used(self, direction: Direction, side: int) -> set[int]:
        return {pair[side] for d, pairs, _ in self.open.values() if d is direction for pair in pairs}

    def _check(self, finished: FinishedCopy) -> None:
        direction, pairs, values = self.open.pop(finished.copy_id)
        assert finished.direction is direction
        assert sorted([*finished.done, *finished.dropped]) == sorted(pairs)
        target = self.engine.host if direction is Direction.DEMOTE else self.engine.pool
        side = Direction.PROMOTE if direction is Direction.DEMOTE else Direction.DEMOTE
        for pair, value in zip(pairs, values, strict=True):
            if pair in finished.done:
                assert target[pair.target] == value
                self.believed[side][pair.target] = value
            elif isinstance(target[pair.target], ScriptedRun):  # a copy that never began left its target unchanged
                target[pair.target] = self.believed[side][pair.target] = f"lost {finished.copy_id}"


TestCopies = Copies.TestCase
TestCopies.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
