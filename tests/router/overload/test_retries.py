"""The budget of further attempts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.overload.retries import MIN_RETRIES, RETRY_SHARE, RetryBudget


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 2000)), max_size=300))
def test_no_more_are_under_way_than_a_share_of_the_requests(steps: list[tuple[bool, int]]) -> None:
    budget = RetryBudget()
    for is_begin, in_flight in steps:
        before = budget.under_way
        if not is_begin:
            if before:
                budget.give_back()
        elif budget.take(in_flight):
            assert before < max(MIN_RETRIES, RETRY_SHARE * in_flight)
            assert budget.under_way == before + 1
        else:
            assert before >= max(MIN_RETRIES, RETRY_SHARE * in_flight)
            assert budget.under_way == before
