"""Tokens that a pod holds below its pool cost the lesser of fetching and computing them, in views and in columns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.fetch_costs import FetchCost, FetchCosts
from engine.contract.keys import PrefixKey
from engine.contract.load import LoadReport, StepCost
from router.routing.fetching import (
    add_shared,
    fetch_or_compute_s,
    reaching,
    wide_add_shared,
    wide_fetch_or_compute_s,
    wide_reaching,
)
from router.routing.policies import make_policy
from router.routing.weights import Weights
from router.views.latency import prefill_s, told_s
from router.views.pod_state import PodState
from router.views.table import PodTable, WideTiers
from router.views.types import PodId, PodView, RequestInfo

COST = StepCost(base_s=6e-3, token_s=22e-6, attention_s=1e-9)
WEIGHTS = Weights(0.2, 0.5, 0.05, 0.05, 0.05, 0.5)
PROMPT = 8000
fetch_costs = st.builds(FetchCost, st.sampled_from([0.0, 1e-3, 0.05]), st.sampled_from([0.0, 1e-6, 2e-5, 1e-4, 1e-2]))
SHARED_S, SHARED_TOKEN_S = st.sampled_from([0.0, 1e-3, 0.05]), st.sampled_from([1e-6, 2e-5, 1e-4, 1e-2])
"""A pod with tokens to fetch from the shared tier has reported what a fetch costs."""


@st.composite
def held(draw: st.DrawFn) -> PodView:
    host, disk, shared = [draw(st.integers(0, PROMPT)) // 3 for _ in range(3)]
    matched = draw(st.integers(host + disk + shared, PROMPT))
    fetch = FetchCosts(draw(fetch_costs), draw(fetch_costs), draw(st.builds(FetchCost, SHARED_S, SHARED_TOKEN_S)))
    return PodView(PodId("a"), matched, host, disk, cost=COST, fetch=fetch, shared_tokens=shared)


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
        column([p.shared_tokens for p in pods]),
        column([told_s(p.host_tokens, p.fetch.host) for p in pods]),
        column([told_s(p.disk_tokens, p.fetch.disk) for p in pods]),
        column([told_s(p.shared_tokens, p.fetch.shared) for p in pods]),
    )
    found = wide_fetch_or_compute_s(tiers, COST, column([uncached(p) for p in pods]), PROMPT, WEIGHTS)
    assert found.tolist() == [seconds(p) for p in pods]


@given(
    held(), st.sampled_from(["host", "disk", "shared"]), st.floats(1, 100), st.sampled_from(["latency_s", "token_s"])
)
def test_a_slower_tier_is_never_cheaper_and_none_is_dearer_than_computing(
    pod: PodView, tier: str, factor: float, field: str
) -> None:
    cost = getattr(pod.fetch, tier)
    slower = FetchCost(**{**{f: getattr(cost, f) for f in FetchCost.__slots__}, field: getattr(cost, field) * factor})
    before = seconds(pod)
    pod.fetch = FetchCosts(**{**{f: getattr(pod.fetch, f) for f in FetchCosts.__slots__}, tier: slower})
    below = pod.host_tokens + pod.disk_tokens + pod.shared_tokens
    computed_s = prefill_s(COST, uncached(pod) + below, PROMPT) - prefill_s(COST, uncached(pod), PROMPT)
    assert 0 <= before <= seconds(pod) <= computed_s * (1 + 1e-9) + 1e-12


def test_a_fast_tier_is_worth_going_to_and_a_slow_one_is_not() -> None:
    """One pod has the prompt in host memory, and a queue of 20 ms. The other has neither. Computing takes 44 ms."""
    request = RequestInfo((PrefixKey(1),), 2000, 100.0)
    for token_s, expected in ((1e-6, "warm"), (1e-3, "cold")):
        fetch = FetchCosts(host=FetchCost(0.0, token_s))
        pods = [
            PodView(PodId("cold"), cost=COST),
            PodView(PodId("warm"), 1990, 1990, cost=COST, fetch=fetch, in_flight=1, prefill_free_at_s=100.02),
        ]
        assert pods[make_policy("predicted_ttft").choose(request, pods).pod].pod_id == expected


def fleet(shared_token_s: float, *, holders: int = 1, waits_s: float = 0.03) -> list[PodView]:
    """Return pods. The first `holders` have the prompt in the pool and a queue. All report the same shared tier."""
    fetch = FetchCosts(shared=FetchCost(0.0, shared_token_s))
    pods = [
        PodView(PodId(f"pod-{i}"), 1990 if i < holders else 256, cost=COST, prefill_free_at_s=100.0) for i in range(4)
    ]
    for pod in pods:
        pod.fetch = fetch
    for pod in pods[:holders]:
        pod.in_flight, pod.prefill_free_at_s = int(waits_s > 0), 100.0 + waits_s
    add_shared(pods)
    return pods


REQUEST = RequestInfo((PrefixKey(1),), 2000, 100.0)


def test_other_pods_fetch_what_one_pod_holds_if_that_is_faster() -> None:
    """1,734 tokens take 38 ms to compute. A fetch has to save at least 7 % of that."""
    for token_s, fetches in ((1e-6, True), (20e-6, True), (21e-6, False), (1e-3, False), (0.0, False)):
        pods = fleet(token_s) if token_s else [PodView(PodId("a"), 1990), PodView(PodId("b"), 256)]
        assert [pod.shared_tokens for pod in pods[1:]] == [1734 if fetches else 0] * len(pods[1:]), token_s
        assert pods[0].shared_tokens == 0
        assert [pod.matched_tokens for pod in pods] == [1990, *[256] * len(pods[1:])], (
            "what a pod could fetch is not added"
        )
        assert [pod.matched_tokens for pod in reaching(pods)[1:]] == [1990 if fetches else 256] * len(pods[1:])


def test_what_only_a_pod_without_the_shared_tier_holds_cannot_be_fetched() -> None:
    fetch = FetchCosts(shared=FetchCost(0.0, 1e-6))
    pods = [
        PodView(PodId("a"), 1990, cost=COST),
        PodView(PodId("b"), 256, cost=COST, fetch=fetch),
        PodView(PodId("c"), 0, cost=COST, fetch=fetch),
    ]
    add_shared(pods)
    assert [pod.shared_tokens for pod in pods] == [0, 0, 256]


@pytest.mark.parametrize(
    ("token_s", "waits_s", "moves"),
    [(1e-6, 0.03, True), (1e-6, 0.0, False), (1e-3, 0.03, False), (15e-6, 0.02, False)],
    ids=["cheap", "nobody waits", "dear", "dearer than to wait"],
)
def test_traffic_goes_where_it_is_idle_once_a_fetch_is_cheap(token_s: float, waits_s: float, moves: bool) -> None:
    """Without a fetch another pod would compute the tokens in 38 ms. Waiting 20 or 30 ms for the holder is faster."""
    pods = fleet(token_s, waits_s=waits_s)
    decision = make_policy("predicted_ttft").choose(REQUEST, pods)
    assert (decision.pod != 0) == moves
    assert decision.predicted_cached_tokens == 1990
    explained = make_policy("predicted_ttft").choose(REQUEST, pods, explain=True)
    fetch_s = [score.parts["fetch_s"] for score in explained.scores]
    assert fetch_s == pytest.approx([0.0] + [token_s * 1734 if token_s < 20e-6 else 0.0] * 3)


@given(
    st.lists(
        st.tuples(st.integers(0, PROMPT), st.sampled_from([0.0, 1e-6, 18e-6, 1e-3]), st.sampled_from([0.0, 0.01])),
        min_size=2,
        max_size=6,
    )
)
def test_many_pods_reach_what_few_do(told: list[tuple[int, float, float]]) -> None:
    """Columns and views agree. A pod fetches no tokens that it holds, or that it computes sooner."""
    states = []
    for _, token_s, latency_s in told:
        state = PodState()
        state.report(LoadReport(cost=COST, fetch=FetchCosts(shared=FetchCost(latency_s, token_s))), now_s=1.0)
        states.append(state)
    ids = [PodId(f"pod-{i}") for i in range(len(told))]
    views = [
        state.view(pod_id, now_s=1.0, matched_tokens=matched)
        for pod_id, state, (matched, _, _) in zip(ids, states, told, strict=True)
    ]
    if any(token_s for _, token_s, _ in told):
        add_shared(views)
    wide = PodTable(zip(ids, states, strict=True)).at(1.0)
    for row, (matched, _, _) in enumerate(told):
        wide.hold(np.array([row]), matched)
    wide_add_shared(wide)
    reached = wide_reaching(wide)
    assert reached.matched is not None
    assert reached.matched.tolist() == [view.matched_tokens for view in reaching(views)]
    for row, view in enumerate(views):
        seconds = 0.0 if wide.tiers is None else wide.tiers.shared_s[row]
        assert seconds == told_s(view.shared_tokens, states[row].fetch_costs.shared)
        assert seconds <= COST.token_s * view.shared_tokens


def test_costs_last_told_hold_until_others_are_told() -> None:
    """A report without fetch costs, such as a snapshot's, leaves them as they are."""
    state, told = PodState(), FetchCosts(disk=FetchCost(0.002, 1e-5))
    state.report(LoadReport(cost=COST, fetch=told), now_s=1.0)
    state.report(LoadReport(cost=COST), now_s=2.0)
    assert state.fetch_costs == told
    state.report(LoadReport(cost=COST, fetch=FetchCosts(disk=FetchCost(0.0, 2e-5))), now_s=3.0)
    assert state.fetch_costs.disk.seconds(100) == pytest.approx(2e-3)
