"""Properties that policies keep for any pods, and choices in situations made by hand."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.keys import PrefixKey
from engine.contract.load import StepCost
from router.routing import ties
from router.routing.policies import POLICY_NAMES, PolicyOptions, make_policy
from router.routing.predicted_ttft import PredictedTtft
from router.routing.terms import DELAY_TERMS, REPLICATION_TERMS, TTFT_TERMS
from router.routing.ties import RULES, TIE_SHARE
from router.views.pick import by_hash
from router.views.pod_partition import PodPartition
from router.views.types import PodId, PodScore, RequestInfo
from tests.router.routing.pods import Made, candidates, choose

NOW_S = 100.0
COST = StepCost(base_s=6e-3, token_s=22e-6, attention_s=1e-9, context_s=7e-8, sequence_s=2e-5)


@st.composite
def pod_views(draw: st.DrawFn, prompt_tokens: int = 4000) -> Made:
    matched = draw(st.integers(0, prompt_tokens))
    pending = draw(st.integers(0, 5))
    decoding = draw(st.integers(0, 20))
    known = draw(st.booleans())
    return Made(
        PodId("unnamed"),
        matched_tokens=matched,
        host_tokens=draw(st.integers(0, matched)),
        in_flight=pending + decoding,
        uncached_tokens=pending * 500,
        decoding=decoding,
        context_tokens=decoding * 1000,
        free_at_s=NOW_S + draw(st.floats(-1, 2)),
        cost=COST if known else StepCost(base_s=0.01, token_s=1e-4),
        cost_is_prior=not known,
        overhead_s=0.0 if known else 0.009,
    )


@st.composite
def fleets(draw: st.DrawFn) -> list[Made]:
    views = draw(st.lists(pod_views(), min_size=1, max_size=8))
    return [replace(view, pod_id=PodId(f"pod-{i}")) for i, view in enumerate(views)]


@st.composite
def twins(draw: st.DrawFn) -> list[Made]:
    """Pods that differ by little."""
    view = replace(draw(pod_views()), in_flight=1, decoding=1, uncached_tokens=0)
    late = st.floats(0, 1e-3)
    count = draw(st.integers(2, 5))
    return [
        replace(view, pod_id=PodId(f"pod-{i}"), free_at_s=NOW_S + draw(late), decoding=draw(st.integers(0, 1)))
        for i in range(count)
    ]


KEYS = st.lists(st.integers(0, 2**64 - 1).map(PrefixKey), max_size=20, unique=True).map(tuple)
REQUESTS = st.builds(RequestInfo, keys=KEYS, prompt_tokens=st.just(4000), now_s=st.just(NOW_S))
NAMES = pytest.mark.parametrize("name", POLICY_NAMES)


def chosen(name: str, request: RequestInfo, pods: Sequence[Made]) -> PodId:
    return pods[choose(make_policy(name), request, pods).pod].pod_id


def nearly_best(scores: Sequence[PodScore]) -> list[int]:
    """Return the pods with the lowest score; for `predicted_ttft` also those that `ties.py` counts as equal to them."""
    best = min(score.score for score in scores)
    prefill_s = max(score.parts.get("prefill_s", 0.0) for score in scores if score.score == best)
    return [i for i, score in enumerate(scores) if score.score <= best + TIE_SHARE * prefill_s + 1e-12]


@NAMES
@given(requests=st.lists(REQUESTS, min_size=1, max_size=4), pods=fleets())
def test_the_choice_is_the_lowest_score_and_explaining_leaves_no_trace(
    name: str, requests: list[RequestInfo], pods: list[Made]
) -> None:
    policy, silent = make_policy(name), make_policy(name)
    for request in requests:
        explained = [choose(policy, request, pods, explain=True) for _ in range(2)]
        assert explained[0] == explained[1]
        assert [score.pod_id for score in explained[0].scores] == [pod.pod_id for pod in pods]
        decision = choose(policy, request, pods)
        assert decision == choose(silent, request, pods)
        assert decision.pod == explained[0].pod
        assert decision.pod in nearly_best(explained[0].scores)
        assert decision.scores == ()
        assert decision.policy == name
        assert decision.predicted_cached_tokens == pods[decision.pod].matched_tokens
        assert (decision.predicted_ttft_s is not None) == (name == "predicted_ttft")


@given(requests=st.lists(REQUESTS, min_size=1, max_size=6), pods=st.one_of(fleets(), twins()))
def test_every_pod_that_is_not_chosen_says_why(requests: list[RequestInfo], pods: list[Made]) -> None:
    """A score is the sum of its parts, which have the names of the functions. A rule left out each pod that is not
    chosen, or else a hash decided."""
    policy = make_policy("predicted_ttft")
    terms = [term.__name__ for term in (*TTFT_TERMS, *DELAY_TERMS, *REPLICATION_TERMS)]
    for request in requests:
        explained = choose(policy, request, pods, explain=True)
        for score in explained.scores:
            assert list(score.parts) == terms
            assert score.score == pytest.approx(sum(score.parts.values()), rel=1e-9, abs=1e-12)
            assert score.left_out_by in ("", *(rule.__name__ for rule in RULES))
        assert explained.scores[explained.pod].left_out_by == ""
        left = [i for i, score in enumerate(explained.scores) if not score.left_out_by]
        assert {i for i, score in enumerate(explained.scores) if score.left_out_by == "close_score"} == set(
            range(len(pods))
        ) - set(nearly_best(explained.scores))
        if len(left) > 1:
            ids = [explained.scores[i].pod_id for i in left]
            assert choose(policy, request, pods).pod == left[ids.index(hashed(request, ids))]
        choose(policy, request, pods)


def test_the_page_and_explain_name_the_functions() -> None:
    page = (Path(ties.__file__).parent / "POLICIES.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ", page.partition("### `predicted_ttft`")[2], re.MULTILINE)
    explained = choose(make_policy("predicted_ttft"), RequestInfo((), 100, NOW_S), idle(2), explain=True)
    names = [*explained.scores[0].parts, *(rule.__name__ for rule in RULES)]
    assert rows == names


def hashed(request: RequestInfo, ids: Sequence[PodId]) -> PodId:
    """Return the pod that the hash of a request takes."""
    pods = [Made(pod_id) for pod_id in ids]
    return ids[by_hash(request, candidates(pods), np.arange(len(ids)))]


@pytest.mark.parametrize("partition", [None, PodPartition(0.0, 1.0, 0.0)])
@pytest.mark.parametrize("matched", [0, 1200])
def test_of_equally_good_pods_an_idle_one_comes_first_unless_others_send_there(
    partition: PodPartition | None, matched: int
) -> None:
    """The decoding pod has an equally good score, and was chosen longer ago."""
    policy = make_policy("predicted_ttft")
    decoding = Made(PodId("decoding"), matched_tokens=matched, cost=COST, in_flight=1, decoding=1)
    idle_pod = Made(PodId("idle"), matched_tokens=matched, cost=COST)
    for i in range(3):  # the idle pod got all recent requests
        choose(policy, RequestInfo((), 2100, NOW_S + i), [idle_pod])
    chosen = choose(policy, RequestInfo((), 2100, NOW_S + 4, partition=partition), [decoding, idle_pod], explain=True)
    assert chosen.pod == (1 if partition is None else 0)
    assert chosen.scores[0].left_out_by == ("idle_first" if partition is None else "")


@pytest.mark.parametrize(("matched", "rule"), [(0, "idle_first"), (2000, "close_score")], ids=["nothing", "shared"])
def test_ties_are_twice_as_wide_if_traffic_shares_nothing(matched: int, rule: str) -> None:
    """A queue of 0.9 times the request's own prefill makes a difference only if prefixes are shared."""
    policy = make_policy("predicted_ttft")
    view = Made(PodId("pod-0"), matched_tokens=matched, cost=COST)
    for _ in range(60):
        choose(policy, RequestInfo((), 4000, NOW_S), [view, replace(view, pod_id=PodId("pod-1"))])
    request = RequestInfo((), 4000, NOW_S + 1000)
    first = choose(policy, request, [view], explain=True).scores[0]
    busy = replace(view, pod_id=PodId("pod-1"), free_at_s=request.now_s + 0.9 * first.parts["prefill_s"])
    busy = replace(busy, in_flight=1, decoding=1)
    assert choose(policy, request, [view, busy], explain=True).scores[1].left_out_by == rule


@given(requests=st.lists(REQUESTS, min_size=1, max_size=4), pods=fleets())
def test_estimates_for_other_policies_are_predicted_ttfts_own_and_leave_no_trace(
    requests: list[RequestInfo], pods: list[Made]
) -> None:
    policy, silent = make_policy("predicted_ttft"), make_policy("predicted_ttft")
    assert isinstance(policy, PredictedTtft)
    for request in requests:
        ttfts_s = policy.ttfts_s(request, candidates(pods)).tolist()
        explained = choose(policy, request, pods, explain=True)
        assert explained == choose(silent, request, pods, explain=True)
        for score, ttft_s in zip(explained.scores, ttfts_s, strict=True):
            assert ttft_s == sum(score.parts[term.__name__] for term in TTFT_TERMS)
        decision = choose(policy, request, pods)
        assert decision == choose(silent, request, pods)
        assert decision.predicted_ttft_s == ttfts_s[decision.pod]


@given(request=REQUESTS, moments=st.lists(fleets(), min_size=2, max_size=6))
def test_constants_that_change_count_with_the_next_request(request: RequestInfo, moments: list[list[Made]]) -> None:
    """Numbers derived from the pods' constants are kept only while the constants are the same."""
    policy = make_policy("predicted_ttft")
    assert isinstance(policy, PredictedTtft)
    for pods in [*moments, *moments]:
        fresh = make_policy("predicted_ttft")
        assert isinstance(fresh, PredictedTtft)
        seen = candidates(pods)
        assert policy.ttfts_s(request, seen).tolist() == fresh.ttfts_s(request, seen).tolist()


@given(request=REQUESTS, pods=fleets())
def test_pods_that_share_their_constants_count_as_those_with_equal_ones(request: RequestInfo, pods: list[Made]) -> None:
    """Pods of one kind share one object with the constants that were learnt from all of them."""
    shared = [replace(pod, cost=COST) for pod in pods]
    equal = [replace(pod, cost=replace(COST)) for pod in pods]
    policies = [make_policy("predicted_ttft"), make_policy("predicted_ttft")]
    for explain in (True, False):
        assert choose(policies[0], request, shared, explain=explain) == choose(
            policies[1], request, equal, explain=explain
        )


@pytest.mark.parametrize("name", ["cache_aware", "predicted_ttft"])
@given(request=REQUESTS, pods=fleets(), more=st.integers(1, 4000))
def test_a_longer_match_never_makes_a_pod_less_attractive(
    name: str, request: RequestInfo, pods: list[Made], more: int
) -> None:
    best = choose(make_policy(name), request, pods).pod
    matched = min(4000, pods[best].matched_tokens + more)
    better = [replace(pod, matched_tokens=matched) if i == best else pod for i, pod in enumerate(pods)]
    assert choose(make_policy(name), request, better).pod == best


@pytest.mark.parametrize("name", ["least_loaded", "bounded_hash", "cache_aware", "predicted_ttft"])
@given(request=REQUESTS, pods=fleets(), more=st.integers(1, 10), data=st.data())
def test_more_load_never_makes_a_pod_more_attractive(
    name: str, request: RequestInfo, pods: list[Made], more: int, data: st.DataObject
) -> None:
    best = choose(make_policy(name), request, pods).pod
    loaded = data.draw(st.integers(0, len(pods) - 1).filter(lambda i: i != best or len(pods) == 1))
    before = pods[loaded]
    worse = replace(
        before,
        in_flight=before.in_flight + more,
        uncached_tokens=before.uncached_tokens + 500 * more,
        free_at_s=max(NOW_S, before.free_at_s) + 0.01 * more,
    )
    after = choose(make_policy(name), request, [*pods[:loaded], worse, *pods[loaded + 1 :]]).pod
    assert after != loaded or after == best


@given(request=REQUESTS.filter(lambda request: request.keys), pods=fleets())
def test_bounded_hash_keeps_its_bound(request: RequestInfo, pods: list[Made]) -> None:
    pod = pods[choose(make_policy("bounded_hash"), request, pods).pod]
    mean = (sum(view.in_flight for view in pods) + 1) / len(pods)
    assert pod.in_flight <= PolicyOptions().load_bound * mean


@given(pods=fleets(), rounds=st.integers(1, 5))
def test_round_robin_is_fair(pods: list[Made], rounds: int) -> None:
    policy = make_policy("round_robin")
    request = RequestInfo((), 10, NOW_S)
    counts = Counter(choose(policy, request, pods).pod for _ in range(rounds * len(pods)))
    assert set(counts.values()) == {rounds}


def idle(count: int) -> list[Made]:
    return [Made(PodId(f"pod-{i}"), cost=COST) for i in range(count)]


@pytest.mark.parametrize("name", ["prefix_hash", "bounded_hash"])
def test_a_new_pod_takes_its_share_of_prefixes_and_moves_no_other(name: str) -> None:
    requests = [RequestInfo((PrefixKey(i * 2**54),), 100, NOW_S) for i in range(1000)]
    before = [chosen(name, request, idle(8)) for request in requests[:300]]
    after = [chosen(name, request, idle(9)) for request in requests[:300]]
    moved = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert all(new == "pod-8" for _, new in moved)
    assert 10 < len(moved) < 70


@pytest.mark.parametrize("name", ["least_loaded", "cache_aware", "affinity_groups", "predicted_ttft"])
def test_ties_spread_over_prefixes_and_stick_to_each(name: str) -> None:
    requests = [RequestInfo((PrefixKey(i * 2**50 + 7),), 100, NOW_S) for i in range(400)]
    counts = Counter(chosen(name, request, idle(8)) for request in requests)
    assert min(counts.values()) > 25
    assert chosen(name, requests[0], idle(8)) == chosen(name, requests[0], idle(8))


@pytest.mark.parametrize("name", ["prefix_hash", "bounded_hash"])
def test_a_pod_of_twice_the_weight_owns_twice_the_prefixes(name: str) -> None:
    pods = [replace(pod, weight=2.0 if i == 0 else 1.0) for i, pod in enumerate(idle(4))]
    owners = Counter(chosen(name, RequestInfo((PrefixKey(i * 2**49),), 4000, NOW_S), pods) for i in range(2000))
    assert 0.3 < owners[pods[0].pod_id] / 2000 < 0.5
    equal = [replace(pod, weight=1.0) for pod in pods]
    for i in range(200):
        request = RequestInfo((PrefixKey(i * 2**55),), 4000, NOW_S)
        owner = chosen(name, request, pods)
        assert owner in (chosen(name, request, equal), pods[0].pod_id), "the other pods' points on the ring stay"


@pytest.mark.parametrize("name", ["least_loaded", "cache_aware"])
def test_a_pod_of_twice_the_weight_carries_twice_the_load(name: str) -> None:
    pods = idle(3)
    pods[0].weight = 2.0
    for i in range(400):
        request = RequestInfo((PrefixKey(i * 2**50),), 4000, NOW_S)
        pod = next(pod for pod in pods if pod.pod_id == chosen(name, request, pods))
        pod.in_flight += 1
        pod.uncached_tokens += 100
    assert [pod.in_flight for pod in pods] == [200, 100, 100]


@given(request=REQUESTS, pods=fleets(), weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=8, max_size=8))
def test_bounded_hash_keeps_each_pods_share(request: RequestInfo, pods: list[Made], weights: list[float]) -> None:
    pods = [replace(pod, weight=weight) for pod, weight in zip(pods, weights, strict=False)]
    pod = pods[choose(make_policy("bounded_hash"), request, pods).pod]
    share = pod.weight / sum(p.weight for p in pods)
    if request.keys:
        assert pod.in_flight <= 1.25 * share * (sum(p.in_flight for p in pods) + 1) + 1e-9


def test_prompts_without_a_key_spread_over_time() -> None:
    requests = [RequestInfo((), 100, NOW_S + i / 10) for i in range(200)]
    assert len({chosen("predicted_ttft", request, idle(8)) for request in requests}) == 8


def test_noise_in_learnt_speeds_sends_new_prefixes_to_no_favourite() -> None:
    policy = make_policy("predicted_ttft")
    noise = (1.0, 1.15, 0.9, 1.05, 0.85, 1.2, 0.95, 1.1)
    pods = [
        replace(pod, cost=replace(COST, token_s=COST.token_s * factor, base_s=COST.base_s * factor))
        for pod, factor in zip(idle(8), noise, strict=True)
    ]
    requests = [RequestInfo((PrefixKey(i * 2**50 + 7),), 2000, NOW_S + i) for i in range(160)]
    counts = Counter(choose(policy, request, pods).pod for request in requests)
    assert min(counts.values()) >= 15


def test_a_fleet_of_which_little_is_known_counts_as_equally_fast() -> None:
    """After a few answers from each pod, the fitted constants still lean on the prior, some more than others."""
    pods = [
        replace(pod, cost=replace(COST, token_s=COST.token_s * factor), cost_is_prior=True)
        for pod, factor in zip(idle(8), (4.5, 1.0, 3.0, 2.0, 4.5, 1.2, 2.5, 4.5), strict=True)
    ]
    policy = make_policy("predicted_ttft")
    requests = [RequestInfo((PrefixKey(i * 2**50 + 7),), 2000, NOW_S + i) for i in range(160)]
    counts = Counter(choose(policy, request, pods).pod for request in requests)
    assert min(counts.values()) >= 15


@given(overhead_s=st.floats(0.0, 1.0), factor=st.floats(0.1, 10.0), held=st.sampled_from([0, 2000]))
def test_a_pod_that_never_served_is_predicted_as_soon_as_an_idle_one_that_did(
    overhead_s: float, factor: float, held: int
) -> None:
    """One pod reports its constants. The other has fitted ones, with a step's fixed time in `overhead_s`."""
    told = replace(idle(1)[0], cost=COST, matched_tokens=held)
    fitted = StepCost(token_s=factor * COST.token_s)
    untold = replace(told, pod_id=PodId("new"), cost=fitted, cost_is_prior=True, overhead_s=overhead_s)
    assert idle_ttfts_s([told, untold]) == pytest.approx(2 * idle_ttfts_s([told]))


@given(overhead_s=st.floats(0.0, 0.1), spread=st.floats(0.9, 1.1))
def test_the_fixed_part_of_a_step_counts_once_whoever_tells_it(overhead_s: float, spread: float) -> None:
    """Three pods are about equally fast. Two have fitted constants, and one reports them."""
    fitted = replace(idle(1)[0], cost=StepCost(token_s=28e-6), overhead_s=overhead_s)
    told = replace(idle(1)[0], pod_id=PodId("told"), cost=replace(COST, token_s=spread * COST.token_s))
    assert idle_ttfts_s([fitted, replace(fitted, pod_id=PodId("other")), told]) == pytest.approx(
        3 * idle_ttfts_s([fitted])
    )


def idle_ttfts_s(pods: list[Made]) -> list[float]:
    """Return the predicted time to the first token of a prompt on each pod."""
    policy = make_policy("predicted_ttft")
    assert isinstance(policy, PredictedTtft)
    found: list[float] = policy.ttfts_s(RequestInfo((PrefixKey(7),), 2100, NOW_S), candidates(pods)).tolist()
    return found


def test_a_pod_of_half_the_speed_is_told_apart() -> None:
    slow, *fast = idle(3)
    pods = [replace(slow, cost=replace(COST, token_s=2 * COST.token_s, base_s=2 * COST.base_s)), *fast]
    requests = [RequestInfo((PrefixKey(i * 2**50 + 7),), 2000, NOW_S + i) for i in range(40)]
    policy = make_policy("predicted_ttft")
    assert {choose(policy, request, pods).pod for request in requests} == {1, 2}


def test_a_pod_of_another_speed_keeps_its_own_fixed_time() -> None:
    """Its peers report the fixed time of a step and it does not, so its own learnt overhead is used."""
    slow, *fast = idle(3)
    slow = replace(slow, cost=StepCost(token_s=4 * COST.token_s), overhead_s=0.5)
    alone_s, beside_s = idle_ttfts_s([slow])[0], idle_ttfts_s([slow, *fast])[0]
    assert beside_s == pytest.approx(alone_s)


def test_a_pod_nothing_is_known_of_counts_as_fast_as_its_peers() -> None:
    pods = [replace(pod, in_flight=4, decoding=3, free_at_s=NOW_S + 0.02) for pod in idle(3)]
    pods.append(Made(PodId("pod-9"), cost=StepCost(base_s=0.01, token_s=1e-4), cost_is_prior=True))
    assert chosen("predicted_ttft", RequestInfo((PrefixKey(1),), 1000, NOW_S), pods) == "pod-9"


def test_a_slower_tier_costs() -> None:
    request = RequestInfo((PrefixKey(1),), 1000, NOW_S)
    on_gpu, on_host, on_disk = (replace(pod, matched_tokens=900) for pod in idle(3))
    pods = [on_gpu, replace(on_host, host_tokens=900), replace(on_disk, disk_tokens=900)]
    scores = [score.score for score in choose(make_policy("predicted_ttft"), request, pods, explain=True).scores]
    assert scores[0] < scores[1] < scores[2]


@pytest.mark.parametrize(
    "options",
    [
        {"load_bound": 1.0},
        {"match_share": 1.5},
        {"hash_depth_strides": 0},
        {"group_refresh_s": -0.1},
        {"group_hysteresis_pods": 0.1},
    ],
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        PolicyOptions(**options)


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="round_robin, least_loaded"):
        make_policy("fastest")


def test_pods_take_turns_if_traffic_shares_nothing() -> None:
    """If all queues are shorter than a prefill, all pods are chosen equally often."""
    policy, counts = make_policy("predicted_ttft"), Counter[PodId]()
    for number in range(400):
        now_s = NOW_S + 0.01 * number
        waits_s = [0.08 * ((7 * pod + 3 * number) % 8) / 8 for pod in range(8)]
        pods = [
            Made(PodId(f"pod-{i}"), free_at_s=now_s + wait_s, cost=COST, cost_is_prior=False)
            for i, wait_s in enumerate(waits_s)
        ]
        decision = choose(policy, RequestInfo((PrefixKey(number),), 3000, now_s), pods)
        if number >= 80:
            counts[pods[decision.pod].pod_id] += 1
    assert max(counts.values()) - min(counts.values()) <= 2


def long_prompt_among_short(pods: Sequence[Made], *, short: int = 300) -> PodId:
    """Return the pod for a prompt of 100,000 tokens after `short` prompts of 4,000."""
    policy = make_policy("predicted_ttft")
    for i in range(short):
        key = PrefixKey(i + 1)
        choose(policy, RequestInfo((key,), 4000, NOW_S + 0.01 * i), [replace(pod, free_at_s=0) for pod in pods])
    return pods[choose(policy, RequestInfo((PrefixKey(9),), 100_000, NOW_S), pods).pod].pod_id


def test_a_long_prompt_waits_for_no_long_queue() -> None:
    """Its own prefill takes 7 s, so two pods whose queues differ by 2 s might be taken as equal."""
    free = Made(PodId("free"), free_at_s=NOW_S, cost=COST)
    busy = Made(PodId("busy"), in_flight=1, uncached_tokens=50_000, free_at_s=NOW_S + 2, cost=COST)
    assert {long_prompt_among_short([free, busy], short=300 + i) for i in range(2)} == {free.pod_id}


def test_a_long_prompt_does_not_queue_behind_another_to_spare_what_decodes_elsewhere() -> None:
    """Sparing those requests is not worth it: they decode for a second or two, and the prompt would wait five seconds
    and then prefill for seven."""
    decoding = Made(PodId("decoding"), in_flight=12, decoding=12, context_tokens=12_000, free_at_s=NOW_S, cost=COST)
    busy = Made(PodId("busy"), in_flight=1, uncached_tokens=80_000, free_at_s=NOW_S + 5, cost=COST)
    assert long_prompt_among_short([decoding, busy]) == decoding.pod_id


def test_a_long_prompt_avoids_what_decodes_in_each_of_its_steps() -> None:
    """49 steps with 20 ms of decoding in each are worse than half a second of waiting."""
    decoding = Made(PodId("decoding"), in_flight=10, decoding=10, context_tokens=280_000, free_at_s=NOW_S, cost=COST)
    busy = Made(PodId("busy"), in_flight=1, free_at_s=NOW_S + 0.5, cost=COST)
    policy = make_policy("predicted_ttft")
    steps_s, wait_s = choose(policy, RequestInfo((), 100_000, NOW_S), [decoding, busy], explain=True).scores
    without_stalls = [score.score - score.parts["stall_s"] for score in (steps_s, wait_s)]
    assert without_stalls[1] < without_stalls[0]
