"""A request that does not fit is not looked up in the cache in each step. Still, it starts just as early."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.eviction import Eviction
from engine.cache.index import IndexKind
from engine.cache.prefix_cache import PrefixCache
from engine.sched.entry import Entry
from engine.sched.plan import SampledToken, StepPlan, StepResult
from engine.sched.request import CacheMark, Request, ToolUse
from engine.sched.scheduler import Scheduler, SchedulerConfig

BLOCK = 4


class Forgetful(Scheduler):
    """A scheduler that tries to start a request in each step."""

    def _lacks_still(self, entry: Entry, hits: int) -> bool:
        return False


def make(kind: type[Scheduler], index: IndexKind, eviction: Eviction, blocks: int) -> Scheduler:
    cache = PrefixCache(
        blocks, BLOCK, index=index, eviction=eviction, pinned_blocks=blocks // 4, learnt_blocks=blocks // 4
    )
    return kind(cache, SchedulerConfig(32, 6, 50, max_overtakes=8))


def step(scheduler: Scheduler, now_s: float) -> list[tuple[object, ...]]:
    """Run one step; return what it computed."""
    scheduler.advance(now_s)
    plan = scheduler.schedule()
    if plan is None:
        return []
    sampled = {chunk.request.id: SampledToken(chunk.request.id % 7) for chunk in plan.chunks if chunk.samples}
    scheduler.complete(StepResult(sampled, 0.01))
    return shown(plan)


def shown(plan: StepPlan) -> list[tuple[object, ...]]:
    return [(c.request.id, c.start, c.tokens, c.blocks, c.samples, c.source) for c in plan.chunks]


def request(rng: random.Random, number: int, begun: list[list[int]]) -> Request:
    """Return a request that in most cases begins like an earlier one."""
    prompt = list(rng.choice(begun))[: rng.randint(1, 90)] if begun and rng.random() < 0.7 else []
    prompt += [rng.randrange(3) for _ in range(rng.randint(1, 40))]
    begun.append(prompt)
    marks = (CacheMark(len(prompt), rng.choice((0.05, 1.0))),) if rng.random() < 0.3 else ()
    tools = ToolUse(may_be_called=True, brings_result=rng.random() < 0.5) if rng.random() < 0.3 else None
    return Request(number, prompt, rng.randint(1, 20), marks=marks, tools=tools)


@pytest.mark.parametrize("index", [IndexKind.HASH, IndexKind.RADIX])
@given(rng=st.randoms(use_true_random=False), blocks=st.integers(40, 90))
@settings(deadline=None, max_examples=40)
def test_every_step_is_that_of_a_scheduler_that_tries_each_time(
    index: IndexKind, rng: random.Random, blocks: int
) -> None:
    eviction = rng.choice((Eviction.LRU, Eviction.LFU))
    schedulers = [make(kind, index, eviction, blocks) for kind in (Scheduler, Forgetful)]
    seed, now_s = rng.randrange(2**32), 0.0
    choices = [random.Random(seed) for _ in schedulers]
    begun: list[list[list[int]]] = [[] for _ in schedulers]
    for number in range(30):
        now_s += 0.02
        for scheduler, own, prompts in zip(schedulers, choices, begun, strict=True):
            scheduler.add(request(own, number, prompts))
        if rng.random() < 0.2:
            gone = rng.randrange(number + 1)
            assert len({scheduler.abort(gone) for scheduler in schedulers}) == 1
        if rng.random() < 0.05:
            assert len({scheduler.reset_cache() for scheduler in schedulers}) == 1
        for _ in range(rng.randrange(8)):
            ours, theirs = (step(scheduler, now_s) for scheduler in schedulers)
            assert ours == theirs
    while any(scheduler.has_work for scheduler in schedulers):
        now_s += 0.02
        ours, theirs = (step(scheduler, now_s) for scheduler in schedulers)
        assert ours == theirs
        assert ours


@pytest.mark.parametrize("tokens", range(1, 37))
def test_a_request_begins_when_just_what_it_lacks_is_given_back(tokens: int) -> None:
    """The pool has ten blocks. The first request gives its blocks back while the second still runs."""
    schedulers = [make(kind, IndexKind.HASH, Eviction.LRU, 10) for kind in (Scheduler, Forgetful)]
    for scheduler in schedulers:
        scheduler.add(Request(0, list(range(11)), 2))
        scheduler.add(Request(1, list(range(100, 109)), 4))
        step(scheduler, 0.0)
        scheduler.add(Request(2, list(range(200, 200 + tokens)), 1))
    while any(scheduler.has_work for scheduler in schedulers):
        ours, theirs = (step(scheduler, 0.0) for scheduler in schedulers)
        assert ours == theirs


@pytest.mark.parametrize("index", [IndexKind.HASH, IndexKind.RADIX])
def test_what_waits_is_not_matched_in_each_step(index: IndexKind) -> None:
    scheduler = make(Scheduler, index, Eviction.LRU, 300)
    prompt = list(range(800))
    scheduler.add(Request(0, prompt, 1))
    while scheduler.has_work:
        step(scheduler, 0.0)
    scheduler.add(Request(1, list(range(1000, 1200)), 150))
    step(scheduler, 0.0)
    matched = [0]
    inner = scheduler._cache._index
    match = inner.match

    def counted(*args: object) -> object:
        matched[0] += 1
        return match(*args)  # type: ignore[arg-type]

    inner.match = counted  # type: ignore[assignment, method-assign]
    scheduler.add(Request(2, [*prompt, *range(2000, 2300)], 1))
    steps = 0
    while scheduler.load().waiting:
        steps += 1
        step(scheduler, 0.0)
    assert steps > 100, "the request waits until the running one has ended"
    assert 0 < matched[0] < 10
