"""The budget of hedged requests."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from router.overload.hedges import HEDGED_ONE_IN, HedgeBudget


@given(st.lists(st.integers(0, 130), max_size=60))
def test_at_most_one_request_in_fifty_is_hedged_and_one_more(pauses: list[int]) -> None:
    budget, seen, taken_at = HedgeBudget(), 0, []
    for pause in pauses:
        for _ in range(pause):
            budget.saw()
        seen += pause
        if budget.take():
            taken_at.append(seen)
    assert len(taken_at) <= seen / HEDGED_ONE_IN
    assert all(after - before >= HEDGED_ONE_IN for before, after in pairwise(taken_at))


def test_each_fiftieth_request_may_be_hedged() -> None:
    budget, taken = HedgeBudget(), 0
    for _ in range(500):
        budget.saw()
        taken += budget.take()
    assert taken == 500 / HEDGED_ONE_IN
