"""Tokens that a pod holds below its pool cost the lesser of fetching and computing them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.fetch_costs import FetchCost, FetchCosts, is_worth_it
from engine.contract.keys import PrefixKey
from engine.contract.load import LoadReport, StepCost
from router.routing.fetching import add_shared, fetch_or_compute_s, reaching
from router.routing.policies import make_policy
from router.views.latency import prefill_s, told_s
from router.views.pod_state import PodState
from router.views.table import PodTable, TierTokens
from router.views.types import PodId, RequestInfo
from tests.router.routing.pods import Made, candidates, choose

COST = StepCost(base_s=6e-3, token_s=22e-6, attention_s=1e-9)
PROMPT = 8000
fetch_costs = st.builds(FetchCost, st.sampled_from([0.0, 1e-3, 0.05]), st.sampled_from([0.0, 1e-6, 2e-5, 1e-4, 1e-2]))
SHARED_S, SHARED_TOKEN_S = st.sampled_from([0.0, 1e-3, 0.05]), st.sampled_from([1e-6, 2e-5, 1e-4, 1e-2])
"""A pod with tokens to fetch from the shared tier has reported what a fetch costs."""


@dataclass(frozen=True)
class Held:
    """The tokens of a prompt that a pod holds in each tier or can fetch, and what fetching costs."""

    in_pool: int
    host: int
    disk: int
    shared: int
    costs: FetchCosts

    @property
    def uncached(self) -> int:
        return max(1, PROMPT - self.in_pool - self.host - self.disk - self.shared)

    def seconds(self) -> float:
        tiers = TierTokens(
            np.array([float(self.host)]),
            np.array([float(self.disk)]),
            np.array([float(self.shared)]),
            np.array([told_s(self.host, self.costs.host)]),
            np.array([told_s(self.disk, self.costs.disk)]),
            np.array([told_s(self.shared, self.costs.shared)]),
        )
        return float(fetch_or_compute_s(tiers, COST, self.uncached, PROMPT)[0])


PARTS = st.integers(0, PROMPT // 4)
COSTS = st.builds(FetchCosts, fetch_costs, fetch_costs, st.builds(FetchCost, SHARED_S, SHARED_TOKEN_S))


@given(
    st.builds(Held, PARTS, PARTS, PARTS, PARTS, COSTS),
    st.sampled_from(["host", "disk", "shared"]),
    st.floats(1, 100),
    st.sampled_from(["latency_s", "token_s"]),
)
def test_a_slower_tier_is_never_cheaper_and_none_is_dearer_than_computing(
    pod: Held, tier: str, factor: float, field: str
) -> None:
    cost = getattr(pod.costs, tier)
    slower = FetchCost(**{**{f: getattr(cost, f) for f in FetchCost.__slots__}, field: getattr(cost, field) * factor})
    costs = FetchCosts(**{**{f: getattr(pod.costs, f) for f in FetchCosts.__slots__}, tier: slower})
    below = pod.host + pod.disk + pod.shared
    computed_s = prefill_s(COST, pod.uncached + below, PROMPT) - prefill_s(COST, pod.uncached, PROMPT)
    after_s = replace(pod, costs=costs).seconds()
    assert 0 <= pod.seconds() <= after_s <= computed_s * (1 + 1e-9) + 1e-12


def test_a_fast_tier_is_worth_going_to_and_a_slow_one_is_not() -> None:
    """One pod has the prompt in host memory, and a queue of 20 ms. The other has neither. Computing takes 44 ms."""
    request = RequestInfo((PrefixKey(1),), 2000, 100.0)
    for token_s, expected in ((1e-6, "warm"), (1e-3, "cold")):
        fetch = FetchCosts(host=FetchCost(0.0, token_s))
        pods = [
            Made(PodId("cold"), cost=COST),
            Made(PodId("warm"), 1990, 1990, cost=COST, fetch_costs=fetch, in_flight=1, free_at_s=100.02),
        ]
        assert pods[choose(make_policy("predicted_ttft"), request, pods).pod].pod_id == expected


def fleet(shared_token_s: float, *, holders: int = 1, waits_s: float = 0.03) -> list[Made]:
    """Return pods. The first `holders` have the prompt in the pool and a queue. All report the same shared tier."""
    fetch = FetchCosts(shared=FetchCost(0.0, shared_token_s))
    pods = [Made(PodId(f"pod-{i}"), 1990 if i < holders else 256, cost=COST, free_at_s=100.0) for i in range(4)]
    for pod in pods:
        pod.fetch_costs = fetch
    for pod in pods[:holders]:
        pod.in_flight, pod.free_at_s = int(waits_s > 0), 100.0 + waits_s
    return pods


REQUEST = RequestInfo((PrefixKey(1),), 2000, 100.0)


def test_other_pods_fetch_what_one_pod_holds_if_that_is_faster() -> None:
    """1,734 tokens take 38 ms to compute. A fetch has to save at least 7 % of that."""
    for token_s, fetches in ((1e-6, True), (20e-6, True), (21e-6, False), (1e-3, False), (0.0, False)):
        pods = fleet(token_s) if token_s else [Made(PodId("a"), 1990), Made(PodId("b"), 256)]
        seen = candidates(pods)
        shared = [0.0] * len(pods) if seen.tiers is None else seen.tiers.shared.tolist()
        assert shared == [0] + [1734 if fetches else 0] * len(pods[1:]), token_s
        assert [seen.matched_by(row) for row in range(len(pods))] == [1990, *[256] * len(pods[1:])], (
            "what a pod could fetch is not added"
        )
        reached = reaching(seen)
        assert [reached.matched_by(row) for row in range(1, len(pods))] == [1990 if fetches else 256] * len(pods[1:])


def test_what_only_a_pod_without_the_shared_tier_holds_cannot_be_fetched() -> None:
    fetch = FetchCosts(shared=FetchCost(0.0, 1e-6))
    pods = [
        Made(PodId("a"), 1990, cost=COST),
        Made(PodId("b"), 256, cost=COST, fetch_costs=fetch),
        Made(PodId("c"), 0, cost=COST, fetch_costs=fetch),
    ]
    tiers = candidates(pods).tiers
    assert tiers is not None
    assert tiers.shared.tolist() == [0, 0, 256]


@pytest.mark.parametrize(
    ("token_s", "waits_s", "moves"),
    [(1e-6, 0.03, True), (1e-6, 0.0, False), (1e-3, 0.03, False), (15e-6, 0.02, False)],
    ids=["cheap", "nobody waits", "dear", "dearer than to wait"],
)
def test_traffic_goes_where_it_is_idle_once_a_fetch_is_cheap(token_s: float, waits_s: float, moves: bool) -> None:
    """Without a fetch another pod would compute the tokens in 38 ms. Waiting 20 or 30 ms for the holder is faster."""
    pods = fleet(token_s, waits_s=waits_s)
    decision = choose(make_policy("predicted_ttft"), REQUEST, pods)
    assert (decision.pod != 0) == moves
    assert decision.predicted_cached_tokens == 1990
    explained = choose(make_policy("predicted_ttft"), REQUEST, pods, explain=True)
    fetch_s = [score.parts["fetch_s"] for score in explained.scores]
    assert fetch_s == pytest.approx([0.0] + [token_s * 1734 if token_s < 20e-6 else 0.0] * 3)


@given(
    st.lists(
        st.tuples(st.integers(0, PROMPT), st.sampled_from([0.0, 1e-6, 18e-6, 1e-3]), st.sampled_from([0.0, 0.01])),
        min_size=2,
        max_size=6,
    )
)
def test_a_pod_fetches_what_another_one_holds_and_nothing_that_it_computes_sooner(
    told: list[tuple[int, float, float]],
) -> None:
    states = []
    for _, token_s, latency_s in told:
        state = PodState()
        state.report(LoadReport(cost=COST, fetch=FetchCosts(shared=FetchCost(latency_s, token_s))), now_s=1.0)
        states.append(state)
    seen = PodTable((PodId(f"pod-{i}"), state) for i, state in enumerate(states)).at(1.0)
    for row, (matched, _, _) in enumerate(told):
        seen.hold(np.array([row]), matched)
    add_shared(seen)
    reached = reaching(seen)
    most = max([matched for matched, token_s, _ in told if token_s], default=0)
    for row, (matched, token_s, latency_s) in enumerate(told):
        fetched = reached.matched_by(row) - matched
        fetch_s, compute_s = latency_s + token_s * (most - matched), COST.token_s * (most - matched)
        takes = token_s and matched < most and is_worth_it(fetch_s, compute_s)
        assert fetched == (most - matched if takes else 0)


def test_costs_last_told_hold_until_others_are_told() -> None:
    """A report without fetch costs, such as a snapshot's, leaves them as they are."""
    state, told = PodState(), FetchCosts(disk=FetchCost(0.002, 1e-5))
    state.report(LoadReport(cost=COST, fetch=told), now_s=1.0)
    state.report(LoadReport(cost=COST), now_s=2.0)
    assert state.fetch_costs == told
    state.report(LoadReport(cost=COST, fetch=FetchCosts(disk=FetchCost(0.0, 2e-5))), now_s=3.0)
    assert state.fetch_costs.disk.seconds(100) == pytest.approx(2e-3)
