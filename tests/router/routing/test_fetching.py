"""What a pod holds below its pool costs the lesser of fetching and computing, by views and by columns alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.fetch_costs import FetchCost, FetchCosts
from engine.contract.keys import PrefixKey
from engine.contract.load import LoadReport, StepCost
from router.routing.fetching import fetch_or_compute_s, wide_fetch_or_compute_s
from router.routing.latency import prefill_s, told_s
from router.routing.pod_state import PodState
from router.routing.policies import make_policy
from router.routing.types import PodId, PodView, RequestInfo
from router.routing.weights import Weights
from router.routing.wide import WideTiers

COST = StepCost(base_s=6e-3, token_s=22e-6, attention_s=1e-9)
WEIGHTS = Weights(0.2, 0.5, 0.05, 0.05, 0.05, 0.5)
PROMPT = 8000
fetch_costs = st.builds(FetchCost, st.sampled_from([0.0, 1e-3, 0.05]), st.sampled_from([0.0, 1e-6, 2e-5, 1e-4, 1e-2]))


@st.composite
def held(draw: st.DrawFn) -> PodView:
    host, disk = draw(st.integers(0, PROMPT)), draw(st.integers(0, PROMPT))
    host, disk = host // 2, disk // 2
    matched = draw(st.integers(host + disk, PROMPT))
    fetch = FetchCosts(draw(fetch_costs), draw(fetch_costs))
    return PodView(PodId("a"), matched, host, disk, cost=COST, fetch=fetch)


def uncached(pod: PodView) -> int:
    return max(1, PROMPT - pod.matched_tokens)


def seconds(pod: PodView) -> float:
    return fetch_or_compute_s(pod, COST, uncached(pod), PROMPT, WEIGHTS)


@given(st.lists(held(), min_size=1, max_size=4))
def test_columns_say_what_views_say_to_the_bit(pods: list[PodView]) -> None:
    def column(values: list[float]) -> np.ndarray:
        return np.array(values, dtype=np.float64)

    tiers = WideTiers(
        column([p.host_tokens for p in pods]),
        column([p.disk_tokens for p in pods]),
        column([told_s(p.host_tokens, p.fetch.host) for p in pods]),
        column([told_s(p.disk_tokens, p.fetch.disk) for p in pods]),
    )
    found = wide_fetch_or_compute_s(tiers, COST, column([uncached(p) for p in pods]), PROMPT, WEIGHTS)
    assert found.tolist() == [seconds(p) for p in pods]


@given(held(), st.sampled_from(["host", "disk"]), st.floats(1, 100), st.sampled_from(["latency_s", "token_s"]))
def test_a_slower_tier_is_never_cheaper_and_none_is_dearer_than_computing(
    pod: PodView, tier: str, factor: float, field: str
) -> None:
    cost = getattr(pod.fetch, tier)
    slower = FetchCost(**{**{f: getattr(cost, f) for f in FetchCost.__slots__}, field: getattr(cost, field) * factor})
    before = seconds(pod)
    pod.fetch = FetchCosts(**{**{f: getattr(pod.fetch, f) for f in FetchCosts.__slots__}, tier: slower})
    below = pod.host_tokens + pod.disk_tokens
    computed_s = prefill_s(COST, uncached(pod) + below, PROMPT) - prefill_s(COST, uncached(pod), PROMPT)
    assert 0 <= before <= seconds(pod) <= computed_s * (1 + 1e-9) + 1e-12


def test_a_fast_tier_is_worth_going_to_and_a_slow_one_is_not() -> None:
    """One pod has the prompt in host memory and a queue of 20 ms, the other has nothing. Computing takes 44 ms."""
    request = RequestInfo((PrefixKey(1),), 2000, 100.0)
    for token_s, expected in ((1e-6, "warm"), (1e-3, "cold")):
        fetch = FetchCosts(host=FetchCost(0.0, token_s))
        pods = [
            PodView(PodId("cold"), cost=COST),
            PodView(PodId("warm"), 1990, 1990, cost=COST, fetch=fetch, in_flight=1, prefill_free_at_s=100.02),
        ]
        assert pods[make_policy("predicted_ttft").choose(request, pods).pod].pod_id == expected


def test_costs_last_told_hold_until_others_are_told() -> None:
    """Snapshots carry none."""
    state, told = PodState(), FetchCosts(disk=FetchCost(0.002, 1e-5))
    state.report(LoadReport(cost=COST, fetch=told), now_s=1.0)
    state.report(LoadReport(cost=COST), now_s=2.0)
    assert state.fetch_costs == told
    state.report(LoadReport(cost=COST, fetch=FetchCosts(disk=FetchCost(0.0, 2e-5))), now_s=3.0)
    assert state.fetch_costs.disk.seconds(100) == pytest.approx(2e-3)
