"""A fetch is decided in a step of other requests, and that step does not wait until the fetch has begun."""

from __future__ import annotations

import pytest

from engine.cache.prefix_cache import PrefixCache
from engine.contract.load import StepCost
from engine.sched.request import Request
from engine.tiers.copies.base import Direction
from engine.tiers.stores.stats import Decision, Outcome
from tests.engine.tiers.test_tiers_stateful import FixedCost, Pod, make_pod

PROMPT = tuple(range(3, 19))
BLOCKS = (len(PROMPT) - 1) // 2


class DecodeCost(FixedCost):
    """A cost in which decodes take time, too."""

    def cost(self) -> StepCost:
        return StepCost(token_s=1.0, sequence_s=0.01)


class Beside:
    """An engine that decodes one request, and that has PROMPT only in its host tier."""

    def __init__(self, *, blocks: int = 60) -> None:
        self.called = 0
        self.pod: Pod = make_pod(PrefixCache(blocks, 2), (100,), lambda: 0.0, token_s=1.0, rate=1e4, running=4)
        self.scheduler, self.tiers = self.pod.scheduler, self.pod.tiers
        self.scheduler._step_cost = DecodeCost(1.0)  # type: ignore[assignment]  # has the methods that are called
        self.tiers.learn_cost(self.scheduler._step_cost.cost())
        self.tiers._later = self.later
        self.answer(0, PROMPT)
        self.scheduler._cache.reset()
        self.scheduler.add(Request(1, (1,), 30))
        self.step()

    def later(self) -> None:
        self.called += 1

    def step(self) -> set[int]:
        """Run a step; return the requests that it computes."""
        plan = self.scheduler.schedule()
        assert plan is not None
        self.scheduler.complete(self.pod.backend.run(plan))
        return {chunk.request.id for chunk in plan.chunks}

    def answer(self, number: int, prompt: tuple[int, ...]) -> None:
        self.scheduler.add(Request(number, prompt, 1))
        while self.scheduler.has_work:
            self.step()
        while self.tiers.is_busy:
            self.end_copies()

    def end_copies(self) -> None:
        """End the copies in flight."""
        self.pod.copies[0].end_all()
        self.tiers.go_on()

    @property
    def coming(self) -> int:
        """Return the number of blocks for which a copy was requested."""
        return self.pod.links[0].copier.open_blocks(Direction.PROMOTE)


@pytest.mark.parametrize("requests", [1, 3])
def test_it_begins_once_the_step_runs(requests: int) -> None:
    """This holds for any number of requests that want the same blocks."""
    engine = Beside()
    for number in range(2, 2 + requests):
        engine.scheduler.add(Request(number, PROMPT, 1))
    available = engine.scheduler._cache.pool.available
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert (engine.called, engine.coming) == (1, 0)
    assert engine.scheduler._cache.pool.available == available, "planning the step took no block"
    engine.tiers.go_on()
    assert engine.coming == BLOCKS
    assert engine.scheduler._cache.pool.available == available - BLOCKS
    engine.scheduler.complete(engine.pod.backend.run(plan))
    while engine.coming:
        engine.end_copies()
    assert engine.step() == set(range(1, 2 + requests))
    assert engine.tiers.stats.decisions == {Decision.FETCH: 1}
    assert engine.tiers.stats.outcomes == {Outcome.ARRIVED: 1}


def test_fetches_of_one_step_begin_in_order_and_each_knows_of_those_before_it() -> None:
    """Each fetch counts the queue of earlier fetches. Otherwise all would assume an empty queue, and most be late."""
    engine = Beside()
    others = [tuple(range(start, start + 16)) for start in (20, 40)]
    for prompt in others:
        engine.answer(9, prompt)
    engine.scheduler._cache.reset()
    engine.scheduler.add(Request(1, (1,), 30))
    engine.step()
    prompts = [PROMPT, *others]
    for number, prompt in enumerate(prompts, 2):
        engine.scheduler.add(Request(number, prompt, 1))
    assert engine.scheduler.schedule() is not None
    block_s = engine.pod.links[0].copier.seconds_for(Direction.PROMOTE, 1)
    assert block_s is not None
    engine.tiers.go_on()
    assert engine.coming == 3 * BLOCKS
    fetches = engine.tiers._fetches
    assert list(fetches) == [2, 3, 4]
    assert [fetch.lag_s for fetch in fetches.values()] == pytest.approx([i * BLOCKS * block_s for i in range(3)])
    assert engine.tiers._wanted_blocks == [0]


def test_it_begins_at_once_if_no_step_of_others_waits() -> None:
    engine = Beside()
    engine.scheduler.abort(1)
    engine.scheduler.add(Request(2, PROMPT, 1))
    assert engine.scheduler.schedule() is None
    assert (engine.called, engine.coming) == (0, BLOCKS)


@pytest.mark.parametrize("ends", ["abort", "reset"])
def test_what_is_not_wanted_any_more_does_not_begin(ends: str) -> None:
    engine = Beside()
    engine.scheduler.add(Request(2, PROMPT, 1))
    plan = engine.scheduler.schedule()
    assert plan is not None
    if ends == "abort":
        engine.scheduler.abort(2)
    else:
        engine.scheduler.reset_cache()
    engine.tiers.go_on()
    assert engine.coming == 0
    assert not engine.tiers.is_busy
    engine.scheduler.complete(engine.pod.backend.run(plan))
    assert engine.step() == ({1, 2} if ends == "reset" else {1}), "the waiting request is computed"


def test_a_pool_that_has_filled_up_meanwhile_has_it_computed() -> None:
    engine = Beside(blocks=30)
    engine.scheduler.add(Request(2, PROMPT, 1))
    plan = engine.scheduler.schedule()
    assert plan is not None
    cache = engine.scheduler._cache
    other = cache.open([99] * 2 * cache.pool.available)
    assert cache.admit(other, len(other.digests) * 2) is not None
    engine.tiers.go_on()
    assert engine.coming == 0
    assert engine.tiers.stats.decisions == {Decision.COMPUTE: 1}
    cache.release(other)
    engine.scheduler.complete(engine.pod.backend.run(plan))
    assert engine.step() == {1, 2}


@pytest.mark.parametrize("tokens", [1, 20])
def test_what_goes_down_begins_once_a_step_runs(tokens: int) -> None:
    """If other requests run, an ended request's blocks are copied down during their steps, even if its client left."""
    engine = Beside()
    other = tuple(range(40, 56))
    engine.scheduler.add(Request(2, other, tokens))
    engine.step()
    assert engine.scheduler.abort(2) == (tokens > 1)
    link, prompt_blocks = engine.pod.links[0], len(other) // 2
    engine.step()
    assert link.copier.open_blocks(Direction.DEMOTE) == 0, "no copy begins at the request's end or with the next plan"
    assert engine.called > 0
    for _ in range(200):
        engine.tiers.go_on()
        engine.pod.copies[0].end_all()
        engine.step()
        if not engine.scheduler.has_work:
            break
        if link.lower.count_hits(link.lower.open(other), 100) == 2 * prompt_blocks:
            return
    raise AssertionError("the blocks were not copied down")
