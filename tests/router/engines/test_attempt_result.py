"""The result of an attempt, for every combination of what an engine can do and what a client can have."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.engines.attempt_result import (
    DONE,
    GOES_ON,
    REFUSED,
    Began,
    Broken,
    Cause,
    ClientHas,
    Done,
    Ended,
    ErrorEvent,
    ErrorStatus,
    Failed,
    Failure,
    GaveUp,
    GoesOn,
    NoAnswer,
    Observed,
    Refused,
    Retry,
    result_of,
)

MEANINGS = (None, Cause.FULL, Cause.LEAVING, Cause.DEAD)
HEADS: list[Observed] = [
    ErrorStatus(
        status,
        says_when,
        meaning if status >= 500 else None,
        is_unknown_path=is_unknown and status in (404, 405),
        is_unknown_model=is_unknown and status == 400,
        is_keys=is_unknown and status in (401, 403),
    )
    for status, says_when, meaning, is_unknown in itertools.product(
        range(300, 600), (False, True), MEANINGS, (False, True)
    )
]
LATER: list[Observed] = [
    *map(Failed, Failure),
    *[ErrorEvent(code, meaning) for code in (None, 400, 500, 503) for meaning in MEANINGS],
    GaveUp(),
    NoAnswer(),
    *map(Began, (False, True)),
    *map(Ended, (False, True)),
]
WHOLE_BEFORE = (ClientHas.NOTHING, ClientHas.EARLIER_PART)
EVERY: list[tuple[Observed, ClientHas, bool]] = [
    *itertools.product(HEADS, WHOLE_BEFORE, (False, True)),  # a client has no part of an answer whose head just came
    *itertools.product(LATER, ClientHas, (False, True)),
]


def test_every_kind_of_observation_is_here() -> None:
    assert {type(observed) for observed, _, _ in EVERY} == set(get_args(Observed))


def test_a_client_that_has_a_part_never_gets_it_twice() -> None:
    """Another pod is asked for the whole answer only if the client has nothing of this attempt."""
    for observed, client_has, is_at_work in EVERY:
        result = result_of(observed, client_has, is_at_work=is_at_work)
        if client_has is ClientHas.PART:
            assert isinstance(result, GoesOn | Done | Broken)
        else:
            assert isinstance(result, GoesOn | Done | Refused | Retry)


def test_only_a_whole_answer_is_done_and_only_an_answer_goes_on() -> None:
    for observed, client_has, is_at_work in EVERY:
        result = result_of(observed, client_has, is_at_work=is_at_work)
        assert result != DONE or isinstance(observed, Ended)
        assert result != GOES_ON or isinstance(observed, Began)
        assert not isinstance(result, Refused) or isinstance(observed, ErrorStatus)


def test_the_rest_of_a_stream_is_a_stream() -> None:
    kinds: tuple[type[Began | Ended], ...] = (Began, Ended)
    for kind, is_stream in itertools.product(kinds, (False, True)):
        good = GOES_ON if kind is Began else DONE
        for client_has in ClientHas:
            is_unfit = not is_stream and client_has is ClientHas.EARLIER_PART
            assert result_of(kind(is_stream), client_has) == (Retry(Cause.UNABLE, "error") if is_unfit else good)


def test_every_failure_has_the_same_cause_before_and_after_the_client_saw_a_part() -> None:
    for observed in LATER:
        before = result_of(observed, ClientHas.NOTHING)
        after = result_of(observed, ClientHas.PART)
        if isinstance(before, Retry):
            assert isinstance(after, Broken)
            is_turned_away = isinstance(observed, ErrorEvent) and observed.code == 503 and observed.meaning is None
            assert after.cause is (Cause.BROKEN if is_turned_away else before.cause)
        else:
            assert after == before


def test_a_pod_that_is_at_work_is_full_when_it_turns_a_request_away() -> None:
    for observed, client_has, _ in EVERY:
        idle, at_work = (result_of(observed, client_has, is_at_work=is_at_work) for is_at_work in (False, True))
        if isinstance(idle, Retry) and idle.cause is Cause.TURNED_AWAY:
            assert at_work == Retry(Cause.FULL, idle.reason)
        else:
            assert at_work == idle


@pytest.mark.parametrize(
    ("status", "says_when", "cause"),
    [
        (300, False, Cause.NO_ANSWER),
        (307, False, Cause.NO_ANSWER),
        (400, False, None),
        (404, True, None),
        (429, False, Cause.FULL),
        (500, True, Cause.BROKEN),
        (501, False, Cause.UNABLE),
        (502, False, Cause.BROKEN),
        (503, True, Cause.FULL),
        (503, False, Cause.TURNED_AWAY),
    ],
)
def test_statuses(status: int, says_when: bool, cause: Cause | None) -> None:
    result = result_of(ErrorStatus(status, says_when), ClientHas.NOTHING)
    assert result == (REFUSED if cause is None else Retry(cause, "status"))


@given(st.integers(300, 599), st.booleans())
def test_another_pod_is_asked_for_redirects_429_and_5xx_alone(status: int, says_when: bool) -> None:
    result = result_of(ErrorStatus(status, says_when), ClientHas.NOTHING)
    assert isinstance(result, Retry) == (status < 400 or status == 429 or status >= 500)
    assert status < 400 or status >= 500 or not (isinstance(result, Retry) and result.cause.is_pods_fault)


@pytest.mark.parametrize("cause", Cause)
def test_what_is_risky_is_the_pods_fault_or_said_by_the_pod(cause: Cause) -> None:
    assert cause.is_pods_fault or not cause.is_risky or cause in (Cause.DEAD, Cause.ABORTED)
    assert not (cause.is_leaving and cause.is_pods_fault), "a pod that says that it leaves is not at fault"


@pytest.mark.parametrize("failure", Failure)
def test_every_failure_without_an_answer_is_retried(failure: Failure) -> None:
    result = result_of(Failed(failure), ClientHas.NOTHING)
    assert isinstance(result, Retry)
    assert result.reason == failure.value, "the reason is the label in the metrics"
