"""The best pod that was not chosen, and its regret: how much sooner it would have given the first token."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.load import StepCost
from router.routing.policies import PolicyOptions, make_policy
from router.routing.regret import regret_s, rival_of
from router.views.types import PodId, RequestInfo, Rival
from tests.router.routing.pods import Made, choose

SECONDS = st.floats(0, 1e3, allow_nan=False)


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=40), st.data())
def test_the_rival_is_the_soonest_of_the_others(pods: list[tuple[float, float]], data: st.DataObject) -> None:
    kept, prefills = [pod[0] for pod in pods], [pod[1] for pod in pods]
    chosen = data.draw(st.integers(0, len(pods) - 1))
    ttfts = np.array(kept)
    rival = rival_of(ttfts, np.array(prefills), chosen)
    assert ttfts.tolist() == kept
    if rival is None:
        assert len(pods) == 1
        return
    others = [i for i in range(len(pods)) if i != chosen]
    assert rival.pod in others
    assert (rival.ttft_s, rival.prefill_s) == (min(kept[i] for i in others), prefills[rival.pod])


def test_one_prefill_for_all_is_the_rivals_too() -> None:
    assert rival_of(np.array([3.0, 1.0, 2.0]), 0.5, 1) == Rival(2, 2.0, 0.5)


@given(SECONDS, SECONDS, SECONDS, st.integers(1, 10**6), st.integers(1, 10**6))
def test_regret_is_by_how_much_the_rival_would_have_been_sooner(
    wait: float, own: float, actual: float, estimated: int, counted: int
) -> None:
    rival = Rival(1, wait + own, own)
    exact = regret_s(rival, actual, estimated_tokens=estimated, prompt_tokens=estimated)
    assert exact == regret_s(rival, actual, estimated_tokens=estimated, prompt_tokens=None) == actual - rival.ttft_s
    corrected = regret_s(rival, actual, estimated_tokens=estimated, prompt_tokens=counted)
    assert math.isclose(corrected, actual - (wait + own * counted / estimated), rel_tol=1e-6, abs_tol=1e-6)
    assert (corrected <= exact) == (counted >= estimated) or own == 0 or math.isclose(corrected, exact)


@pytest.mark.parametrize("explain", [False, True])
def test_a_decision_has_the_pod_that_was_predicted_next(explain: bool) -> None:
    policy = make_policy("predicted_ttft", PolicyOptions())
    free = [5.0, 0.0, 1.0, 3.0]
    cost = StepCost(token_s=1e-4, base_s=0.01)
    pods = [Made(PodId(f"p{i}"), free_at_s=100 + s, in_flight=1, cost=cost) for i, s in enumerate(free)]
    decision = choose(policy, RequestInfo((), 1000, 100.0), pods, explain=explain)
    assert decision.pod == 1
    assert decision.rival is not None
    assert decision.rival.pod == 2
    assert decision.predicted_ttft_s is not None
    assert decision.rival.ttft_s == pytest.approx(decision.predicted_ttft_s + 1.0, abs=0.1)
    assert choose(policy, RequestInfo((), 1000, 100.0), pods[:1]).rival is None
    assert choose(make_policy("round_robin", PolicyOptions()), RequestInfo((), 1000, 100.0), pods).rival is None
