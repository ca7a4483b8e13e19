"""Copies may take a share of the time of other requests' steps, and at most one operation more."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from engine.cache.eviction import Eviction
from engine.cache.prefix_cache import PrefixCache
from engine.contract.load import StepCost
from engine.sched.request import Request
from engine.tiers.allowance import STEP_SHARE, Allowance, StepSharing
from engine.tiers.build import make_tiers
from engine.tiers.copies.base import Direction
from engine.tiers.stores.opening import emulated_store
from engine.tiers.stores.place import Place
from engine.tiers.stores.stats import Outcome
from tests.engine.tiers.test_tiers_stateful import SETTINGS, FixedCost, Pod, TiersMachine, make_pod

SECONDS = st.floats(1e-6, 10.0)


ENDS = 24
"""Requests of the last test. When one ends, its blocks are processed and released, even if the share is used up."""


class Ticking:
    """A clock that moves on with each reading, so that every operation takes time."""

    def __init__(self, tick_s: float) -> None:
        self.now_s, self._tick_s = 0.0, tick_s

    def __call__(self) -> float:
        self.now_s += self._tick_s
        return self.now_s


@given(st.floats(0.001, 0.5), st.lists(st.tuples(SECONDS, st.lists(SECONDS, max_size=6)), min_size=1, max_size=20))
def test_what_is_spent_is_a_share_of_the_steps_and_one_operation(
    share: float, steps: list[tuple[float, list[float]]]
) -> None:
    """This holds over any range of steps, if each operation begins only when it is allowed."""
    now = [0.0]
    allowance = Allowance(share, lambda: now[0])
    spent: list[float] = []
    operations = [0.0]
    for step_s, wanted in steps:
        allowance.begin_step(step_s)
        before = now[0]
        for operation_s in wanted:
            if allowance.is_left:
                with allowance.spending():
                    now[0] += operation_s
                allowance.move(1, 0.0)
                operations.append(operation_s)
        spent.append(now[0] - before)
    for first in range(len(steps)):
        for stop in range(first + 1, len(steps) + 1):
            bound = share * sum(step_s for step_s, _ in steps[first:stop]) + max(operations)
            assert sum(spent[first:stop]) <= bound * (1 + 1e-9) + 1e-9


def test_nothing_is_bounded_while_no_request_is_computed_and_no_debt_remains() -> None:
    now = [0.0]
    allowance = Allowance(0.01, lambda: now[0])
    allowance.begin_step(0.0)
    for _ in range(5):
        with allowance.spending():
            now[0] += 100.0
        allowance.move(10, 0.5)
        assert (allowance.is_left, allowance.is_bounded) == (True, False)
    allowance.begin_step(1.0)
    with allowance.spending():
        now[0] += 0.1
    assert not allowance.is_left
    for _ in range(9):
        allowance.begin_step(1.0)
        assert not allowance.is_left, "later steps pay for what was overdrawn"
    allowance.begin_step(1.0 + 1e-6)
    assert allowance.is_left


class PacedMachine(TiersMachine):
    """All checks of tiers also pass if their operations take time and are bounded by other requests' steps."""

    tick_s = 0.004

    def make(self, cache: PrefixCache, lower: tuple[int, ...], **fields: object) -> Pod:
        made = super().make(cache, lower, **fields)
        allowance = made.tiers._allowance
        allowance._clock = Ticking(self.tick_s)
        return made


def test_every_token_is_right_however_slow_the_copies_are_made_to_be() -> None:
    run_state_machine_as_test(PacedMachine, settings=settings(SETTINGS, max_examples=30))


class Still:
    """Timers that never fire."""

    def time(self) -> float:
        return 0.0

    def call_at(self, when: float, callback: Callable[[], object], /) -> None:
        """Never call it."""


@pytest.mark.parametrize(("takes_s", "begun"), [(0.0, 3), (1.0, 0)])
def test_made_tiers_pay_with_the_time_that_their_thread_computes(takes_s: float, begun: int) -> None:
    """Tiers pay by CPU time, not by the clock, because the machine may have done something else meanwhile."""
    cache = PrefixCache(60, 2)
    store = emulated_store(Still(), Place.HOST, 600, pool_blocks=60, block_bytes=10, bytes_per_s=1e9)
    tiers = make_tiers(
        cache,
        [store],
        eviction=Eviction.LRU,
        step_tokens=20,
        clock=lambda: 0.0,
        on_end=lambda: None,
        sharing=StepSharing(computed=Ticking(takes_s)),
    )
    tiers.begin_step(1.0)
    for number in range(3):
        sequence = cache.open([number] * 8)
        assert cache.admit(sequence, 8) == 0
        cache.commit(sequence, 8)
        tiers.take_over(sequence)
    assert store.copier.open_blocks(Direction.DEMOTE) == 4 * begun


class DecodeCost(FixedCost):
    """A cost in which decodes take time, too."""

    def cost(self) -> StepCost:
        cost = super().cost()
        return type(cost)(token_s=cost.token_s, sequence_s=1.0)


@pytest.mark.parametrize("tick_s", [0.0001, 0.05, 0.2])
def test_copies_take_their_share_of_the_steps_of_others(tick_s: float) -> None:
    """One request decodes all the time, while prompts push each other out of the pool. Each operation that copies down
    takes `tick_s`. Together they take a share of the steps' time, plus one operation at each request's end."""
    clock = Ticking(0.0)
    cache = PrefixCache(80, 2)
    pod = make_pod(cache, (400,), clock, token_s=1.0, rate=1e9, running=3)
    pod.scheduler._step_cost = DecodeCost(1.0)  # type: ignore[assignment]  # has the methods that are called
    pod.tiers.learn_cost(DecodeCost(1.0).cost())
    allowance = pod.tiers._allowance
    allowance._clock = Ticking(tick_s)
    granted, spent, begin = [0.0], [0.0], allowance.begin_step
    spend, is_bounded = allowance._spend, [False]

    def begin_step(others_s: float) -> None:
        is_bounded[0] = others_s > 0
        granted[0] += STEP_SHARE * others_s
        begin(others_s)

    def spend_too(seconds: float) -> None:
        spent[0] += seconds if is_bounded[0] else 0.0
        spend(seconds)

    allowance.begin_step, allowance._spend = begin_step, spend_too  # type: ignore[method-assign]
    rng = random.Random(4)
    prompts = [tuple(rng.randrange(9) for _ in range(40)) for _ in range(8)]
    pod.scheduler.add(Request(0, (1,), 70))
    number = 0
    while pod.scheduler.has_work:
        if len(pod.scheduler._entries) < 3 and number < 24:
            number += 1
            pod.scheduler.add(Request(number, prompts[number % 8], 1))
        plan = pod.scheduler.schedule()
        if plan is not None:
            pod.scheduler.complete(pod.backend.run(plan))
        for copies in pod.copies:
            copies.end_all()
    stats = pod.tiers.stats
    assert stats.demoted.total() > 0
    assert granted[0] > 0
    assert spent[0] <= granted[0] + tick_s * ENDS, f"{spent[0]} of {granted[0]}"
    if tick_s < 0.001:
        assert stats.outcomes[Outcome.ARRIVED] > 5
