"""The fit finds the constants of a device from its steps, and odd steps do not mislead it."""

from __future__ import annotations

import random
from dataclasses import astuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.load import StepCost
from engine.sched.plan import SequenceChunk, StepPlan
from engine.sched.request import Request
from engine.sched.step_cost import StepCostFit, _non_negative_least_squares, _try_every_set, pace_of, step_features

TRUE = StepCost(base_s=4e-3, token_s=2e-5, attention_s=1e-9, context_s=7e-8, sequence_s=3e-5)


def chunk(start: int, tokens: int, *, decodes: bool = False) -> SequenceChunk:
    return SequenceChunk(Request(0, [0], 1), start, [0] * tokens, [], False, decodes)


def random_plan(rng: random.Random, *, prefill: bool) -> StepPlan:
    decodes = [chunk(rng.randrange(100, 8000), 1, decodes=True) for _ in range(rng.randrange(1, 40))]
    prefills = [chunk(rng.randrange(0, 8000), rng.randrange(16, 2000)) for _ in range(rng.randrange(1, 3))]
    return StepPlan(tuple(decodes + prefills if prefill else decodes))


def seconds(cost: StepCost, plan: StepPlan) -> float:
    return float(sum(c * x for c, x in zip(astuple(cost), step_features(plan), strict=True)))


def error(fit: StepCostFit, rng: random.Random, true: StepCost = TRUE) -> float:
    """Return the largest relative error of a prediction over unseen steps."""
    plans = [random_plan(rng, prefill=i % 2 == 0) for i in range(50)]
    return max(abs(seconds(fit.cost(), plan) / seconds(true, plan) - 1) for plan in plans)


def train(fit: StepCostFit, rng: random.Random, steps: int, true: StepCost = TRUE, noise: float = 0.0) -> None:
    for _ in range(steps):
        plan = random_plan(rng, prefill=rng.random() < 0.5)
        fit.observe(plan, seconds(true, plan) * (1 + noise * rng.uniform(-1, 1)))


def test_features_follow_the_definition_of_step_cost() -> None:
    plan = StepPlan((chunk(100, 50), chunk(7, 1, decodes=True), chunk(9, 1, decodes=True)))
    assert step_features(plan) == (1, 50, 50 * 125, 8 + 10, 2)


def test_a_pace_is_that_of_the_step_and_of_its_decodes_alone() -> None:
    rng = random.Random(5)
    for prefill in (True, False) * 10:
        plan = random_plan(rng, prefill=prefill)
        decodes = StepPlan(tuple(each for each in plan.chunks if each.decodes))
        assert pace_of(TRUE, plan.chunks) == pytest.approx((seconds(TRUE, plan), seconds(TRUE, decodes)))
    alone = StepPlan((chunk(0, 512),))
    assert pace_of(TRUE, alone.chunks) == pytest.approx((seconds(TRUE, alone), 0.0))
    assert pace_of(TRUE, ()) == (0.0, 0.0)


def test_nothing_is_claimed_before_a_few_prefills_were_seen() -> None:
    fit, rng = StepCostFit(), random.Random(0)
    for _ in range(100):
        fit.observe(random_plan(rng, prefill=False), 0.01)
    for _ in range(7):
        fit.observe(random_plan(rng, prefill=True), 0.01)
    assert fit.cost() == StepCost()
    fit.observe(random_plan(rng, prefill=True), 0.01)
    assert fit.cost() != StepCost()


@settings(deadline=None, max_examples=20)
@given(
    st.builds(
        StepCost,
        base_s=st.floats(1e-4, 5e-2),
        token_s=st.floats(1e-6, 1e-3),
        attention_s=st.sampled_from([0, 1e-9, 1e-8]),
        context_s=st.sampled_from([0, 1e-8, 1e-6]),
        sequence_s=st.floats(0, 1e-4),
    ),
    st.integers(0, 100),
)
def test_constants_of_a_steady_device_are_found(true: StepCost, seed: int) -> None:
    fit, rng = StepCostFit(), random.Random(seed)
    train(fit, rng, 300, true)
    assert min(astuple(fit.cost())) >= 0
    assert error(fit, rng, true) < 0.01


def test_noise_is_averaged() -> None:
    fit, rng = StepCostFit(), random.Random(1)
    train(fit, rng, 600, noise=0.1)
    assert error(fit, rng) < 0.1


@pytest.mark.parametrize("factor", [10, 100])
def test_steps_that_hiccup_change_little(factor: int) -> None:
    fit, rng = StepCostFit(), random.Random(2)
    for i in range(400):
        plan = random_plan(rng, prefill=i % 2 == 0)
        fit.observe(plan, seconds(TRUE, plan) * (factor if i % 20 == 19 else 1) * rng.uniform(0.95, 1.05))
    assert error(fit, rng) < 0.15


def test_a_device_that_slows_down_is_followed() -> None:
    fit, rng = StepCostFit(), random.Random(3)
    train(fit, rng, 200)
    slower = StepCost(*(3 * c for c in astuple(TRUE)))
    train(fit, rng, 1000, slower)
    assert error(fit, rng, slower) < 0.05


def test_thousands_of_decode_steps_do_not_erase_what_prefill_costs() -> None:
    fit, rng = StepCostFit(), random.Random(4)
    train(fit, rng, 200)
    plan = random_plan(rng, prefill=False)
    for _ in range(5000):
        fit.observe(plan, seconds(TRUE, plan))
    assert fit.cost().token_s == pytest.approx(TRUE.token_s, rel=0.05)


def test_no_other_coefficients_fit_better() -> None:
    """No coefficient may be negative. At the best fit, the error's slope by a coefficient is 0, or the coefficient is 0
    and only a negative one would fit better."""
    rng = random.Random(6)
    for _ in range(300):
        features = [[rng.choice((0.0, rng.random())) for _ in range(5)] for _ in range(rng.randint(1, 12))]
        wanted = [rng.gauss(0.3, 1.0) for _ in features]
        matrix = [[sum(row[i] * row[j] for row in features) for j in range(5)] for i in range(5)]
        vector = [sum(row[i] * y for row, y in zip(features, wanted, strict=True)) for i in range(5)]
        present = tuple(i for i in range(5) if matrix[i][i] > 0)
        for found in (_non_negative_least_squares(matrix, vector), _try_every_set(matrix, vector, present)):
            slopes = [vector[i] - sum(a * w for a, w in zip(matrix[i], found, strict=True)) for i in range(5)]
            assert min(found) >= 0
            assert max(slopes) < 1e-5
            assert all(abs(slope) < 1e-5 for slope, w in zip(slopes, found, strict=True) if w > 0)


def test_steps_that_never_vary_are_predicted() -> None:
    fit = StepCostFit()
    plan = StepPlan((chunk(0, 512),))
    for _ in range(100):
        fit.observe(plan, 0.02)
    assert seconds(fit.cost(), plan) == pytest.approx(0.02, rel=1e-3)


def test_times_that_are_not_positive_are_ignored() -> None:
    fit = StepCostFit()
    for _ in range(20):
        fit.observe(StepPlan((chunk(0, 512),)), 0.0)
    assert fit.cost() == StepCost()


def test_the_shortest_step_follows_the_device() -> None:
    """The shortest time is known from the first step on. If the device slows down, it rises in a few hundred steps."""
    fit = StepCostFit()
    assert fit.least_s == 0
    for number in range(100):
        fit.observe(StepPlan((chunk(0, 100 + number),)), 0.010 + 1e-5 * number)
    assert fit.least_s == 0.010
    for number in range(2000):
        fit.observe(StepPlan((chunk(0, 100 + number % 100),)), 0.020 + 1e-5 * (number % 100))
    assert fit.least_s == 0.020
    fit.observe(StepPlan((chunk(0, 1),)), 0.005)
    assert fit.least_s == 0.005
