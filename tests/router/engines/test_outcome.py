"""The table of outcomes: every status and every failure has an outcome, and the consequences are consistent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.engines.outcome import FAILURES, Outcome, of_status


@pytest.mark.parametrize(
    ("status", "says_when", "outcome"),
    [
        (200, False, Outcome.ANSWERED),
        (299, False, Outcome.ANSWERED),
        (300, False, Outcome.REFUSED),
        (307, False, Outcome.REFUSED),
        (400, False, Outcome.REFUSED),
        (404, True, Outcome.REFUSED),
        (429, False, Outcome.FULL),
        (500, True, Outcome.BROKEN),
        (501, False, Outcome.UNABLE),
        (502, False, Outcome.BROKEN),
        (503, True, Outcome.FULL),
        (503, False, Outcome.TURNED_AWAY),
    ],
)
def test_statuses(status: int, says_when: bool, outcome: Outcome) -> None:
    assert of_status(status, says_when=says_when) is outcome


@given(st.integers(100, 599), st.booleans())
def test_another_pod_is_asked_for_429_and_5xx_alone(status: int, says_when: bool) -> None:
    outcome = of_status(status, says_when=says_when)
    assert outcome.is_retried == (status == 429 or status >= 500)
    assert status >= 500 or not outcome.is_blamed


@pytest.mark.parametrize("outcome", Outcome)
def test_what_is_blamed_is_retried_and_what_is_risky_is_blamed(outcome: Outcome) -> None:
    assert outcome.is_retried or not outcome.is_blamed
    assert outcome.is_blamed or not outcome.is_risky or outcome in (Outcome.DEAD, Outcome.ABORTED)
    assert not (outcome.is_leaving and outcome.is_blamed), "a pod that says that it leaves is not blamed"


def test_every_failure_without_an_answer_is_retried() -> None:
    assert all(outcome.is_retried for outcome in FAILURES.values())
