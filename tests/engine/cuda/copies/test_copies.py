"""Copies between pool and host tier, with a scripted engine: batching, bounds, rates, and other engines' bugs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tiers.copies.base import BlockPair, BlockRun, Direction
from engine.tiers.copies.copier import BlockCopier, CopyLimits
from engine.tiers.copies.fences import FenceError
from engine.tiers.copies.rates import CopyRate
from engine.tiers.copies.runs import batch, jobs
from tests.engine.cuda.copies.copy_script import BLOCK_BYTES, BLOCK_S, ScriptedEngine

DEMOTE, PROMOTE = Direction.DEMOTE, Direction.PROMOTE


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make(blocks: int = 16, slots: int = 16, **limits: int) -> tuple[BlockCopier, ScriptedEngine, Clock]:
    engine, clock = ScriptedEngine(blocks, slots), Clock()
    return BlockCopier(engine, clock, CopyLimits(**limits)), engine, clock


def pairs(*numbers: tuple[int, int]) -> list[BlockPair]:
    return [BlockPair(*n) for n in numbers]


shuffled = st.permutations(range(12)).flatmap(
    lambda targets: st.lists(st.integers(0, 11), min_size=1, max_size=12).map(
        lambda sources: [BlockPair(s, t) for s, t in zip(sources, targets, strict=False)]
    )
)


@given(shuffled, st.integers(1, 5))
def test_batches_hold_every_pair_once_in_as_few_runs_as_there_are(asked: list[BlockPair], most: int) -> None:
    runs = batch(DEMOTE, asked, most)
    assert sorted(pair for run in runs for pair in run.pairs) == sorted(asked)
    assert all(1 <= run.blocks <= most for run in runs)
    starts = [p for p in asked if BlockPair(p.source - 1, p.target - 1) not in asked]
    lengths = [
        next(n for n in itertools.count(1) if BlockPair(p.source + n, p.target + n) not in asked) for p in starts
    ]
    assert len(runs) == sum(-(-length // most) for length in lengths)
    firsts = [min(asked.index(pair) for pair in run.pairs) for run in runs]
    assert firsts == sorted(firsts)


def test_neighbours_move_in_one_run_even_if_eviction_names_them_backwards() -> None:
    asked = pairs((9, 3), (8, 2), (7, 1), (4, 0))
    assert batch(DEMOTE, asked, 8) == [BlockRun(DEMOTE, 7, 1, 3), BlockRun(DEMOTE, 4, 0, 1)]


def test_runs_go_to_the_engine_as_jobs_that_are_as_large_as_may_be() -> None:
    runs = [BlockRun(DEMOTE, 10 * i, 0, blocks) for i, blocks in enumerate((3, 1, 1, 2, 4, 1))]
    assert [[run.blocks for run in job] for job in jobs(runs, 4)] == [[3, 1], [1, 2], [4], [1]]
    copier, engine, _ = make(job_bytes=4 * BLOCK_BYTES)
    copier.promote(pairs((0, 9), (2, 7), (4, 5), (6, 3), (8, 1)))
    assert [len(job) for job in engine.jobs] == [4, 1]


def test_runs_of_a_job_that_have_moved_are_kept_if_another_one_fails() -> None:
    copier, engine, _ = make()
    copier.promote(pairs((0, 9), (2, 7), (4, 5)))
    engine.end(engine.in_flight[1], fails=True)
    assert copier.poll() == [], "the job's other runs may still be copied"
    engine.end_all()
    (finished,) = copier.poll()
    assert (finished.done, finished.dropped) == (tuple(pairs((0, 9), (4, 5))), tuple(pairs((2, 7))))
    assert finished.error == "the link is down"
    assert copier.bytes_per_s(PROMOTE) == pytest.approx(BLOCK_BYTES / BLOCK_S)


def test_what_is_in_flight_is_bounded_and_refilled() -> None:
    copier, engine, _ = make(job_bytes=2 * BLOCK_BYTES, in_flight_bytes=5 * BLOCK_BYTES)
    copier.demote([BlockPair(i, i) for i in range(12)])
    assert [run.blocks for run in engine.started] == [2, 2]
    assert copier.in_flight_bytes(DEMOTE) == 4 * BLOCK_BYTES
    engine.end(engine.in_flight[1])
    assert copier.poll() == []
    assert [run.source for run in engine.started] == [0, 2, 4]


def test_a_block_larger_than_the_bounds_still_moves() -> None:
    copier, engine, _ = make(job_bytes=1, in_flight_bytes=1)
    copier.promote(pairs((0, 5), (1, 6)))
    assert [run.blocks for run in engine.started] == [1]
    for _ in range(2):
        engine.end_all()
        finished = copier.poll()
    assert finished[0].done == tuple(pairs((0, 5), (1, 6)))


def test_both_directions_are_in_flight_at_once() -> None:
    copier, engine, _ = make(in_flight_bytes=BLOCK_BYTES)
    copier.demote(pairs((0, 0)))
    copier.promote(pairs((1, 1)))
    assert {run.direction for run in engine.started} == {DEMOTE, PROMOTE}


def test_a_copy_waits_for_the_steps_it_names_and_others_pass_it() -> None:
    copier, engine, _ = make()
    copier.demote(pairs((0, 0)), after_step=2)
    copier.demote(pairs((1, 1)), after_step=1)
    copier.step_ended(1)
    assert [run.source for run in engine.started] == [1]
    copier.step_ended(2)
    assert [run.source for run in engine.started] == [1, 0]


class TestBugsOfOtherEngines:
    """Silent corruption in other engines. Here a fence refuses the copy or the step, or the order is forced."""

    def test_a_freed_block_is_not_reused_while_it_is_stored(self) -> None:
        """vLLM 45357 and 52360: preemption freed blocks that a store had not yet read, and a step wrote them again."""
        copier, engine, _ = make()
        copier.demote(pairs((3, 0)))
        assert not copier.fences.is_block_idle(3)
        assert copier.fences.is_block_readable(3)
        with pytest.raises(FenceError, match="a step writes pool block 3, which an open copy still reads"):
            copier.fences.check_step(reads=(), writes=(3,))
        with pytest.raises(FenceError, match="a promote writes pool block 3, which an open copy still reads"):
            copier.promote(pairs((5, 3)))
        engine.end_all()
        assert not copier.fences.is_block_idle(3), "the end has not been reported yet"
        copier.poll()
        copier.fences.check_step(reads=(), writes=(3,))
        copier.promote(pairs((5, 3)))

    def test_a_host_slot_is_not_evicted_before_its_load_has_ended(self) -> None:
        """SGLang 31427: the host's copy was evicted, and its memory refilled, during a load."""
        copier, engine, _ = make()
        copier.promote(pairs((4, 9)))
        assert not copier.fences.is_slot_idle(4)
        with pytest.raises(FenceError, match="a demote writes host slot 4, which an open copy still reads"):
            copier.demote(pairs((1, 4)))
        engine.end_all()
        copier.poll()
        copier.demote(pairs((1, 4)))

    def test_a_loaded_block_is_not_read_before_it_is_whole(self) -> None:
        """SGLang 22811: a layer was computed on a buffer whose load it had not waited for."""
        copier, engine, _ = make()
        copier.promote(pairs((4, 9)))
        with pytest.raises(FenceError, match="a step reads pool block 9, which an open copy still writes"):
            copier.fences.check_step(reads=(9,), writes=())
        with pytest.raises(FenceError, match="a demote reads pool block 9, which an open copy still writes"):
            copier.demote(pairs((9, 0)))
        engine.end_all()
        copier.poll()
        copier.fences.check_step(reads=(9,), writes=())

    def test_a_slot_is_not_loaded_before_it_is_stored(self) -> None:
        """SGLang 27504: garbled text from a tier that was read while it was being written."""
        copier, engine, _ = make()
        copier.demote(pairs((2, 7)))
        assert not copier.fences.is_slot_readable(7)
        with pytest.raises(FenceError, match="a promote reads host slot 7, which an open copy still writes"):
            copier.promote(pairs((7, 1)))
        engine.end_all()
        copier.poll()
        copier.promote(pairs((7, 1)))

    def test_a_cancelled_load_keeps_its_blocks_until_its_bytes_have_landed(self) -> None:
        """vLLM 47653: blocks of an aborted request went to another while a transfer was still writing them."""
        copier, engine, _ = make(job_bytes=BLOCK_BYTES, in_flight_bytes=BLOCK_BYTES)
        copy = copier.promote(pairs((0, 10), (1, 11)))
        copier.cancel(copy)
        assert copier.poll() == []
        assert not copier.fences.is_block_idle(10)
        engine.end_all()
        (finished,) = copier.poll()
        assert (finished.done, finished.dropped) == (tuple(pairs((0, 10))), tuple(pairs((1, 11))))
        assert copier.fences.is_block_idle(10)
        assert copier.fences.is_block_idle(11)

    def test_one_block_is_not_promised_twice(self) -> None:
        """mini-sglang: pages in use were in the free list twice."""
        copier, engine, _ = make()
        with pytest.raises(FenceError, match="a promote writes the same pool block twice"):
            copier.promote(pairs((0, 3), (1, 3)))
        assert copier.open_copies == 0
        assert engine.started == []
        assert copier.fences.is_slot_idle(0)


def test_one_source_may_be_copied_twice_at_once() -> None:
    copier, engine, _ = make()
    copier.promote(pairs((0, 3)))
    copier.promote(pairs((0, 4)))
    engine.end(engine.in_flight[0])
    copier.poll()
    assert not copier.fences.is_slot_idle(0)
    engine.end_all()
    copier.poll()
    assert copier.fences.is_slot_idle(0)


@pytest.mark.parametrize(("asked", "message"), [((16, 0), "pool block 16; there are 16"), ((0, -1), "host slot -1")])
def test_places_that_are_not_there_are_refused(asked: tuple[int, int], message: str) -> None:
    copier, _, _ = make()
    with pytest.raises(FenceError, match=message):
        copier.demote(pairs(asked))
    with pytest.raises(ValueError, match="a demote needs at least one block"):
        copier.demote([])


def test_a_copy_that_cannot_start_ends_with_its_error() -> None:
    copier, engine, _ = make()
    engine.refuses = True
    copier.demote(pairs((0, 0)))
    (finished,) = copier.poll()
    assert (finished.done, finished.dropped, finished.error) == ((), tuple(pairs((0, 0))), "the link is down")
    assert copier.fences.is_slot_idle(0)
    assert copier.bytes_per_s(DEMOTE) is None


def test_a_cancelled_copy_that_waits_for_a_step_ends_at_once() -> None:
    copier, engine, _ = make()
    copier.cancel(copier.demote(pairs((0, 0)), after_step=5))
    (finished,) = copier.poll()
    assert finished.dropped == tuple(pairs((0, 0)))
    copier.step_ended(5)
    assert engine.started == []


def test_the_queue_costs_what_was_asked_for_and_has_not_ended() -> None:
    copier, engine, _ = make(job_bytes=BLOCK_BYTES, in_flight_bytes=2 * BLOCK_BYTES)
    assert copier.seconds_for(PROMOTE, 4) is None
    copier.promote(pairs((0, 0)))
    engine.end_all()
    copier.poll()
    assert copier.bytes_per_s(PROMOTE) == pytest.approx(BLOCK_BYTES / BLOCK_S)
    assert copier.bytes_per_s(DEMOTE) is None
    copy = copier.promote([BlockPair(i, i) for i in range(1, 7)])
    assert copier.seconds_for(PROMOTE, 4) == pytest.approx(10 * BLOCK_S)
    engine.end(engine.in_flight[0])
    copier.poll()
    assert copier.seconds_for(PROMOTE, 4) == pytest.approx(9 * BLOCK_S)
    copier.cancel(copy)
    assert copier.seconds_for(PROMOTE, 4) == pytest.approx(6 * BLOCK_S)


def test_a_stalled_copy_is_noticed_before_it_ends() -> None:
    copier, engine, clock = make(job_bytes=BLOCK_BYTES)
    copier.promote(pairs((0, 0)))
    engine.end_all()
    copier.poll()
    copier.promote(pairs((1, 1), (2, 3)))
    usual = copier.bytes_per_s(PROMOTE)
    clock.now_s = BLOCK_S
    assert copier.bytes_per_s(PROMOTE) == pytest.approx(usual)
    clock.now_s = 100.0
    assert copier.bytes_per_s(PROMOTE) == pytest.approx(2 * BLOCK_BYTES / (100 + BLOCK_S))
    clock.now_s = 100.25
    engine.end(engine.in_flight[0])
    copier.poll()
    assert copier.bytes_per_s(PROMOTE) == pytest.approx(usual), "the next copy has just begun"


@given(st.lists(st.tuples(st.integers(1, 10**9), st.floats(1e-6, 10)), min_size=1, max_size=30))
def test_a_rate_lies_between_the_slowest_and_the_fastest_copy(copies: list[tuple[int, float]]) -> None:
    rate = CopyRate(half_life_bytes=10**8)
    for moved, seconds in copies:
        rate.observe(moved, seconds)
    speeds = [moved / seconds for moved, seconds in copies]
    measured = rate.bytes_per_s()
    assert measured is not None
    assert min(speeds) * (1 - 1e-9) <= measured <= max(speeds) * (1 + 1e-9)


def test_a_rate_follows_the_link_with_its_half_life() -> None:
    rate = CopyRate(half_life_bytes=1000)
    rate.observe(1_000_000, 1.0)
    rate.observe(1000, 1.0)
    assert rate.bytes_per_s() == pytest.approx((500_000 + 1000) / 1.5)
    rate.observe(0, 1.0)
    rate.observe(1000, 0.0)
    assert rate.bytes_per_s() == pytest.approx((500_000 + 1000) / 1.5)


@pytest.mark.parametrize("name", ["job_bytes", "in_flight_bytes", "half_life_bytes"])
def test_limits_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        CopyLimits(**{name: 0})
