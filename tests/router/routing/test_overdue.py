"""A pod that is late with another gateway's request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.load import LoadReport, StepCost
from router.views.overdue import LOST_S, TOLD_S
from router.views.pod_state import PodState
from tests.router.routing.pods import seen_of

COST = StepCost(base_s=0.01, token_s=1e-4)


def asked(tokens: int = 1000) -> tuple[PodState, float]:
    """Return a pod to which another gateway sent a request at 0, and when its first token is due."""
    pod = PodState()
    pod.report(LoadReport(cost=COST), now_s=-100.0)
    pod.sent_elsewhere("theirs", prompt_tokens=tokens, uncached_tokens=tokens, output_tokens=9, now_s=0.0)
    return pod, pod.queue_s(0.0)


def wait_s(pod: PodState, now_s: float) -> float:
    """Return the seconds until the pod could begin a request; the pod and its row in a table must agree."""
    wait_s = max(0.0, seen_of(pod, now_s).free_at_s - now_s)
    assert pod.queue_s(now_s) == pytest.approx(wait_s)
    return wait_s


@given(st.integers(1, 20_000), st.floats(0.0, LOST_S - 0.01))
def test_a_pod_counts_as_late_except_for_the_time_that_news_takes(tokens: int, late_s: float) -> None:
    pod, due_s = asked(tokens)
    found_s = wait_s(pod, due_s + late_s)
    if late_s <= TOLD_S:
        assert found_s <= 1e-9
    else:
        assert late_s - TOLD_S <= found_s + 1e-9 <= late_s - TOLD_S + 0.1, "the wait may be one step longer"


@pytest.mark.parametrize("ends", [PodState.began_elsewhere, PodState.finished_elsewhere])
def test_news_of_the_request_ends_its_lateness(ends: object) -> None:
    pod, due_s = asked()
    assert wait_s(pod, due_s + 1.0) > 0.5
    ends(pod, "theirs", now_s=due_s + 1.0)  # type: ignore[operator]
    assert wait_s(pod, due_s + 1.1) == 0.0


def test_a_gateway_that_is_gone_keeps_no_pod_late() -> None:
    pod, due_s = asked()
    assert wait_s(pod, due_s + LOST_S - 0.1) > 1.0
    assert wait_s(pod, due_s + LOST_S + 0.1) == 0.0
    assert wait_s(pod, due_s + LOST_S + 0.2) == 0.0


def test_what_was_heard_of_in_time_never_counts() -> None:
    pod, due_s = asked()
    pod.began_elsewhere("theirs", now_s=due_s / 2)
    assert wait_s(pod, due_s + 1.0) == 0.0
