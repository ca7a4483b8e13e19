"""A queue that stands is told from a burst, and then only requests that can still be in time wait."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.overload.standing import EASY_SHARE, INTERVALS, NO_GOAL, Goal, Standing, goal_of

GOAL = Goal(2.0, 0.5)
TIMES = st.floats(0, 100)


def after(waits_s: list[tuple[float, float]], goal: Goal = GOAL) -> Standing:
    """Return the state after requests left at the given moments with the given waits."""
    standing = Standing()
    for now_s, waited_s in waits_s:
        standing.left(waited_s, goal, now_s)
    return standing


@given(st.lists(st.tuples(TIMES, TIMES), max_size=30))
def test_a_queue_stands_after_two_goals_without_a_short_wait(leaving: list[tuple[float, float]]) -> None:
    leaving.sort()
    standing = after(leaving)
    easy = [place for place, (_, waited) in enumerate(leaving) if waited < EASY_SHARE * GOAL.longest_wait_s]
    long = leaving[easy[-1] + 1 :] if easy else leaving
    now_s = 200.0 if not long else long[0][0] + INTERVALS * GOAL.ttft_s
    assert standing.lasts(GOAL, now_s + 1e-6) is bool(long)
    assert not long or not standing.lasts(GOAL, now_s - 1e-6)


@given(st.lists(st.tuples(TIMES, TIMES), max_size=30), TIMES)
def test_an_empty_queue_never_stands(leaving: list[tuple[float, float]], later_s: float) -> None:
    standing = after(sorted(leaving))
    standing.emptied()
    assert not standing.lasts(GOAL, 100 + later_s)


@given(st.lists(st.tuples(TIMES, TIMES), max_size=30))
def test_without_a_goal_no_queue_stands(leaving: list[tuple[float, float]]) -> None:
    assert not after(sorted(leaving)).lasts(NO_GOAL, 1e9)


@given(st.floats(0, 100), st.floats(0.001, 100))
def test_a_goal_that_is_set_counts_and_the_learnt_one_grows_with_the_prompt(own_s: float, wanted_s: float) -> None:
    assert goal_of(own_s, wanted_s).ttft_s == wanted_s
    assert goal_of(own_s, 0).ttft_s == math.inf
    assert goal_of(own_s, None).longest_wait_s >= 1.0
    assert goal_of(own_s + 1, None).ttft_s == pytest.approx(goal_of(own_s, None).ttft_s + 4)
