"""A queue that stands is told from a burst, and then only requests that can still be in time wait."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.overload.standing import EASY_SHARE, HOLDS_S, INTERVALS, NO_GOAL, Goal, Goals, Standing, goal_of

GOAL = Goal(2.0, 0.5)
EASY_S = EASY_SHARE * GOAL.longest_wait_s
STANDS_S = INTERVALS * GOAL.ttft_s
TIMES = st.floats(0, 100)
LEAVING = st.lists(st.tuples(TIMES, TIMES), max_size=30).map(sorted)
"""When requests left, and how long each had waited."""


def after(leaving: list[tuple[float, float]], goal: Goal = GOAL) -> Standing:
    """Return the state after requests left at the given moments with the given waits."""
    standing = Standing()
    for now_s, waited_s in leaving:
        standing.left(waited_s, goal, now_s)
    return standing


def stood_at(leaving: list[tuple[float, float]]) -> list[float]:
    """Return the moments at which the queue had had only long waits for long enough, by the definition."""
    found, since_s = [], math.inf
    for now_s, waited_s in leaving:
        since_s = math.inf if waited_s < EASY_S else min(since_s, now_s)
        if now_s - since_s >= STANDS_S:
            found.append(now_s)
    return found


@given(LEAVING)
def test_a_queue_stands_after_two_goals_without_a_short_wait_and_some_time_after(
    leaving: list[tuple[float, float]],
) -> None:
    now_s = leaving[-1][0] if leaving else 0.0
    stood = stood_at(leaving)
    assert after(leaving).lasts(GOAL, now_s) is any(now_s < at_s + HOLDS_S for at_s in stood)


@given(LEAVING)
def test_a_burst_that_ends_within_two_goals_is_no_standing_queue(leaving: list[tuple[float, float]]) -> None:
    first_s = leaving[0][0] if leaving else 0.0
    burst = [(at_s, waited_s) for at_s, waited_s in leaving if at_s - first_s < STANDS_S]
    standing = after(burst)
    standing.emptied()
    assert not standing.lasts(GOAL, 1000.0)
    assert not any(standing.lasts(GOAL, at_s) for at_s, _ in burst)


@given(LEAVING)
def test_an_empty_queue_stands_no_longer_than_the_hold(leaving: list[tuple[float, float]]) -> None:
    standing = after(leaving)
    standing.emptied()
    assert not standing.lasts(GOAL, 100 + HOLDS_S)


@given(LEAVING)
def test_without_a_goal_no_queue_stands(leaving: list[tuple[float, float]]) -> None:
    assert not after(leaving).lasts(NO_GOAL, 1e9)
    assert not after(leaving, NO_GOAL).lasts(GOAL, 1e9)


@given(st.floats(0, 100), st.floats(0.001, 100))
def test_a_goal_that_is_set_counts_and_the_learnt_one_grows_with_the_prompt(own_s: float, wanted_s: float) -> None:
    assert goal_of(own_s, wanted_s).ttft_s == wanted_s
    assert goal_of(own_s, 0).ttft_s == math.inf
    assert goal_of(own_s, None).longest_wait_s >= 1.0
    assert goal_of(own_s + 1, None).ttft_s == pytest.approx(goal_of(own_s, None).ttft_s + 4)


def test_a_tenants_goal_goes_before_a_models_and_that_before_the_gateways() -> None:
    goals = Goals(5.0, {"m": 2.0})
    assert (goals.of("m", 1.0), goals.of("m", None), goals.of("n", None)) == (1.0, 2.0, 5.0)
    assert goals.of("m", 0) == 0
    assert Goals().of("m", None) is None
