"""A run of decode steps has the same effect as its steps one by one."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.prefix_cache import PrefixCache
from engine.sched.config import SchedulerConfig
from engine.sched.output import TokenOutput
from engine.sched.plan import SampledToken, StepPlan, StepResult
from engine.sched.request import Request
from loadgen.simulate.pods.runs import RunScheduler

Spec = tuple[int, int, int]
"""Steps before the arrival, prompt tokens, answer tokens."""


def make(blocks: int) -> RunScheduler:
    return RunScheduler(PrefixCache(blocks, 4), SchedulerConfig(max_step_tokens=16, max_running=6, max_waiting=100))


def token(request: Request, ahead: int = 0) -> int:
    return 1 + (7 * request.id + len(request.output_tokens) + ahead) % 50


def one_by_one(scheduler: RunScheduler, steps: int) -> list[tuple[int, str | None]]:
    ends: list[tuple[int, str | None]] = []
    for _ in range(steps):
        plan = scheduler.schedule()
        if plan is None:
            break
        tokens = {chunk.request.id: SampledToken(token(chunk.request)) for chunk in plan.chunks if chunk.samples}
        ends += [(o.request_id, o.finish) for o in scheduler.complete(StepResult(tokens, 0.01)) if o.finish]
    return ends


def in_runs(scheduler: RunScheduler, steps: int, rng: random.Random) -> list[tuple[int, str | None]]:
    ends: list[tuple[int, str | None]] = []
    while steps > 0:
        plan = scheduler.schedule_run(rng.randint(1, 40))
        if plan is None:
            break
        count = min(steps, rng.randint(1, scheduler.run_steps))
        steps -= count
        outputs = finish(scheduler, plan, count)
        ends += [(o.request_id, o.finish) for o in outputs if o.finish]
    return ends


def finish(scheduler: RunScheduler, plan: StepPlan, count: int) -> list[TokenOutput]:
    if scheduler.run_steps == 1:
        tokens = {chunk.request.id: SampledToken(token(chunk.request)) for chunk in plan.chunks if chunk.samples}
        return scheduler.complete(StepResult(tokens, 0.01))
    run = {chunk.request.id: [token(chunk.request, i) for i in range(count)] for chunk in plan.chunks}
    return scheduler.complete_run(run, 0.01 * count)


@given(
    specs=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=8),
    blocks=st.integers(18, 60),
    rng=st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=150)
def test_runs_equal_single_steps(specs: list[Spec], blocks: int, rng: random.Random) -> None:
    single, run = make(blocks), make(blocks)
    for number, (steps, prompt, answer) in enumerate([*specs, (400, 1, 1)]):
        assert one_by_one(single, steps) == in_runs(run, steps, rng)
        for scheduler in (single, run):
            scheduler.add(Request(number, [9] * (prompt // 2) + [number + 60] * (prompt - prompt // 2), answer))
        assert single.stats() == run.stats()
        assert single.held_keys() == run.held_keys()
        one, other = single.load(), run.load()
        assert (one.running, one.waiting, one.uncached_tokens) == (other.running, other.waiting, other.uncached_tokens)
        assert (one.context_tokens, one.blocks_free) == (other.context_tokens, other.blocks_free)


def test_a_run_ends_where_a_request_may_end() -> None:
    scheduler = make(60)
    scheduler.add(Request(1, [1, 2, 3], 9))
    one_by_one(scheduler, 1)
    plan = scheduler.schedule_run(100)
    assert plan is not None
    assert scheduler.run_steps == 8


def test_nothing_runs_ahead_of_a_waiting_request() -> None:
    scheduler = RunScheduler(PrefixCache(60, 4), SchedulerConfig(max_step_tokens=16, max_running=1, max_waiting=10))
    for number in (1, 2):
        scheduler.add(Request(number, [number] * 5, 9))
    one_by_one(scheduler, 1)
    plan = scheduler.schedule_run(100)
    assert plan is not None
    assert scheduler.run_steps == 1


@pytest.mark.parametrize("tokens", [[], [1] * 9, [5, 1]])
def test_a_run_that_cannot_have_been_is_refused(tokens: list[int]) -> None:
    scheduler = make(60)
    scheduler.add(Request(1, [1, 2, 3], 9, stop_token_ids=frozenset((5,))))
    one_by_one(scheduler, 1)
    assert scheduler.schedule_run(100) is not None
    with pytest.raises(ValueError, match="request 1"):
        scheduler.complete_run({1: tokens}, 0.1)
    assert scheduler.fail_step() == [1]
