"""Traffic shares, and the groups of pods that follow them."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace

import pytest

from engine.contract.keys import PrefixKey
from engine.contract.load import StepCost
from router.routing.affinity_groups import AffinityGroups
from router.routing.policies import make_policy
from router.routing.shares import TrafficShares
from router.views.types import PodId, RequestInfo
from tests.router.routing.pods import Made, choose

PODS = [Made(PodId(f"pod-{i}"), cost=StepCost(token_s=1e-4)) for i in range(8)]
FIRST = PrefixKey(1)


def shares() -> TrafficShares:
    return TrafficShares(half_life_s=10.0, limit=100, depth_strides=16)


def keys(name: int, count: int = 4) -> tuple[PrefixKey, ...]:
    """Return the first key, which all requests share, and a chain of keys that only `name` has."""
    return (FIRST, *(PrefixKey(1000 * name + i) for i in range(2, 2 + count)))


def test_shares_follow_recent_traffic() -> None:
    counters = shares()
    for i in range(100):
        counters.record(keys(1 if i % 4 else 2), 1.0, now_s=i * 0.1)
    assert counters.share(keys(1)[1], 10.0) == pytest.approx(0.75, abs=0.02)
    assert counters.share(FIRST, 10.0) == pytest.approx(1.0)
    for i in range(100):
        counters.record(keys(2), 1.0, now_s=100 + i * 0.1)
    assert counters.share(keys(1)[1], 110.0) < 0.01


def test_own_share_leaves_out_longer_popular_prefixes() -> None:
    counters = shares()
    for i in range(100):
        counters.record(keys(1 if i % 10 < 6 else 100 + i), 1.0, now_s=0.0)
    popular = counters.popular(0.1, 0.0)
    assert popular[FIRST].share == pytest.approx(1.0)
    assert popular[FIRST].own == pytest.approx(0.4)
    assert popular[keys(1)[-1]].own == pytest.approx(0.6)
    assert popular[keys(1)[1]].own == pytest.approx(0.0)


def test_memory_is_bounded_and_keeps_the_heaviest() -> None:
    counters, rng = shares(), random.Random(1)
    for i in range(3000):
        counters.record(keys(7), 1.0, now_s=i * 0.01)
        counters.record(tuple(PrefixKey(rng.getrandbits(64)) for _ in range(8)), 1.0, now_s=i * 0.01)
    assert len(counters.export(30.0).keys) <= 100
    assert counters.share(keys(7)[-1], 30.0) == pytest.approx(0.5, abs=0.02)


def test_a_newcomer_counts_from_its_first_request_on_though_there_are_as_many_keys_as_are_kept() -> None:
    counters = shares()
    for name in range(25):
        counters.record(tuple(PrefixKey(1000 * name + i) for i in range(4)), 10.0, now_s=0.0)
    for _ in range(30):
        counters.record((PrefixKey(99),), 1.0, now_s=0.0)
    assert counters.share(PrefixKey(99), 0.0) == pytest.approx(30 / (250 + 30))


def test_gateways_that_exchange_reports_agree() -> None:
    one, other = shares(), shares()
    for _ in range(30):
        one.record(keys(1), 1.0, now_s=0.0)
    for _ in range(10):
        other.record(keys(2), 1.0, now_s=0.0)
    one_report, other_report = one.export(5.0), other.export(5.0)
    one.merge("other", other_report, 5.0)
    one.merge("other", other_report, 5.0)
    other.merge("one", one_report, 5.0)
    for key in (*keys(1), *keys(2)):
        assert one.share(key, 7.0) == pytest.approx(other.share(key, 7.0))
    assert one.share(keys(2)[-1], 7.0) == pytest.approx(0.25)
    ours, theirs = one.popular(0.1, 7.0), other.popular(0.1, 7.0)
    assert ours.keys() == theirs.keys()
    for key, popularity in ours.items():
        assert popularity.own == pytest.approx(theirs[key].own, abs=1e-9)
    assert len(one.export(7.0).keys) == len(one_report.keys), "a report holds a gateway's own traffic alone"


def test_a_gateway_that_has_gone_is_forgotten() -> None:
    one, other = shares(), shares()
    other.record(keys(2), 1.0, now_s=0.0)
    one.merge("other", other.export(0.0), 0.0)
    one.merge("third", shares().export(200.0), 200.0)
    assert one.share(keys(2)[0], 200.0) == 0.0


def drive(policy: AffinityGroups, popular_share: float, start_s: float, count: int = 600) -> dict[str, set[PodId]]:
    """Send equally costly requests. Return the pods that the popular prefix and rare ones use in the second half."""
    rng = random.Random(5)
    used: dict[str, set[PodId]] = {"popular": set(), "rare": set()}
    for i in range(count):
        is_popular = int((i + 1) * popular_share) > int(i * popular_share)
        request = RequestInfo(keys(1) if is_popular else keys(50 + i), 1000, start_s + i * 0.1)
        pods = [replace(pod, in_flight=rng.randrange(3)) for pod in PODS]
        pod = PODS[choose(policy, request, pods).pod].pod_id
        if i >= count // 2:
            used["popular" if is_popular else "rare"].add(pod)
    return used


def groups_policy() -> AffinityGroups:
    policy = make_policy("affinity_groups")
    assert isinstance(policy, AffinityGroups)
    return policy


def test_80_percent_of_the_traffic_gets_6_of_8_pods_and_what_no_pod_holds_goes_anywhere() -> None:
    policy = groups_policy()
    drive(policy, 0.8, 0.0)
    used = drive(policy, 0.8, 60.0)
    group = set(policy._groups.owned[keys(1)[-1]])
    assert len(group) == 6
    assert group <= used["popular"]
    assert used["rare"] & group
    assert used["rare"] - group


def after_popular_traffic() -> tuple[AffinityGroups, set[PodId]]:
    """Return a policy after a minute of a popular prefix, and the prefix's group."""
    policy = groups_policy()
    drive(policy, 0.8, 0.0)
    return policy, set(policy._groups.owned[keys(1)[-1]])


def test_a_prompt_that_no_pod_holds_goes_to_the_least_loaded_pod_even_in_the_group() -> None:
    """An exception is a pod that has already had more than its share."""
    policy, group = after_popular_traffic()
    idle = [[replace(pod, uncached_tokens=0 if pod.pod_id == name else 500) for pod in PODS] for name in sorted(group)]
    request = RequestInfo(keys(900), 1000, 60.1)
    chosen = [PODS[choose(policy, request, pods, explain=True).pod].pod_id for pods in idle]
    assert set(chosen) & group


def test_a_pod_beside_the_group_that_holds_its_prefix_takes_part() -> None:
    policy, group = after_popular_traffic()
    beside = min({pod.pod_id for pod in PODS} - group)
    request = RequestInfo((*keys(1), PrefixKey(77)), 1200, 60.1)

    def chosen(holders: set[PodId]) -> PodId:
        pods = [
            replace(
                pod,
                matched_tokens=1000 if pod.pod_id in holders else 0,
                uncached_tokens=0 if pod.pod_id == beside else 500,
            )
            for pod in PODS
        ]
        return PODS[choose(policy, request, pods, explain=True).pod].pod_id

    assert chosen(group | {beside}) == beside
    assert chosen(group) in group


def test_a_group_follows_its_share_with_hysteresis() -> None:
    policy = groups_policy()
    drive(policy, 0.8, 0.0)
    drive(policy, 0.77, 60.0, count=1500)
    assert len(policy._groups.owned[keys(1)[-1]]) == 6
    drive(policy, 0.3, 300.0, count=1500)
    assert len(policy._groups.owned[keys(1)[-1]]) in (2, 3)


def test_a_conversation_stays_on_its_pod_until_that_is_past_the_bound() -> None:
    policy = groups_policy()
    home = choose(policy, RequestInfo(keys(3, count=3), 1000, 0.0), PODS).pod
    pods = [replace(pod, matched_tokens=600 if i == home else 0, in_flight=20) for i, pod in enumerate(PODS)]
    pods[home] = replace(pods[home], uncached_tokens=3000)
    request = RequestInfo(keys(3, count=6), 1000, 0.1)
    assert choose(policy, request, pods).pod == home
    pods[home] = replace(pods[home], in_flight=40)
    assert choose(policy, request, pods).pod != home


@pytest.mark.parametrize("strides", [1, 2, 5])
def test_a_pod_is_no_home_of_a_prompt_of_which_it_holds_less_than_a_key(strides: int) -> None:
    """Keys represent equal parts of a prompt. A pod that holds all tokens of the first key is a home of the prompt, so
    it gets the request although it has more to do."""
    request = RequestInfo(keys(3, strides - 1), 1000, 0.0)
    for tokens, is_home in ((1000 // strides, True), (1000 // strides - 2, False)):
        pods = list(PODS)
        pods[3] = replace(pods[3], matched_tokens=tokens, uncached_tokens=3000)
        assert (choose(groups_policy(), request, pods).pod == 3) == is_home


def test_equally_popular_prefixes_keep_to_few_pods_and_load_them_evenly() -> None:
    """Each of sixteen system prompts has the load of half a pod. Most stay on their first pod, and a few spread to
    balance the load."""
    policy, rng = groups_policy(), random.Random(3)
    held: dict[int, set[int]] = {name: set() for name in range(16)}
    latest: deque[int] = deque(maxlen=16)
    sent: Counter[int] = Counter()
    for i in range(400):
        name = rng.randrange(16)
        request = RequestInfo((*keys(name), PrefixKey(10**9 + i)), 1000, i * 0.1)
        pods = [
            replace(pod, matched_tokens=830 if j in held[name] else 0, in_flight=latest.count(j))
            for j, pod in enumerate(PODS)
        ]
        latest.append(choose(policy, request, pods).pod)
        held[name].add(latest[-1])
        sent[latest[-1]] += 1
    assert sum(map(len, held.values())) <= 28
    assert max(sent.values()) <= 1.25 * 400 / len(PODS)


def test_a_group_without_a_pod_left_gives_way() -> None:
    """A retry leaves out a pod; if that pod was the whole group, any other pod serves."""
    policy = groups_policy()
    drive(policy, 0.1, 0.0)
    request = RequestInfo(keys(1), 1000, 60.0)
    first = choose(policy, request, PODS).pod
    others = [pod for i, pod in enumerate(PODS) if i != first]
    assert others[choose(policy, request, others).pod].pod_id != PODS[first].pod_id


def conversations(policy: AffinityGroups, pods: list[Made], popular_share: float, turns: int = 6) -> list[PodId]:
    """Return the pods of 1,000 sessions' requests in order; a session's turn finds what its previous turn left."""
    rng, chosen, at_s = random.Random(3), list[PodId](), 0.0
    held: dict[int, PodId] = {}
    sessions = deque(range(1000))
    active: deque[tuple[int, int]] = deque()
    while sessions or active:
        while sessions and len(active) < 40:
            active.append((sessions.popleft(), 1))
        session, turn = active.popleft()
        name = 1 if session % 100 < 100 * popular_share else 2 + session
        chain = (*keys(name), *(PrefixKey(10**9 + 100 * session + i) for i in range(4 * turn)))
        tokens = 250 * len(chain)
        views = [
            replace(
                pod, in_flight=rng.randrange(3), matched_tokens=tokens - 1000 if held.get(session) == pod.pod_id else 0
            )
            for pod in pods
        ]
        held[session] = pods[choose(policy, RequestInfo(chain, tokens, at_s), views).pod].pod_id
        chosen.append(held[session])
        at_s += 0.02
        if turn < turns:
            active.append((session, turn + 1))
    return chosen


def test_a_group_that_does_not_come_out_in_whole_pods_burdens_none_of_them() -> None:
    """30 % of the load is as much as 2.4 of 8 pods can take. In a group of two, each would have 1.2 times its share."""
    served = Counter(conversations(groups_policy(), PODS, 0.3))
    assert max(served.values()) <= 1.15 * served.total() / len(PODS)


def test_conversations_stay_where_they_are_while_groups_change() -> None:
    """The popular prompt's share falls from one half to a fifth, and its group shrinks with it."""
    policy = groups_policy()
    drive(policy, 0.5, 0.0, count=300)
    owned = policy._groups.owned[keys(1)[-1]]
    chain = (*keys(1), *(PrefixKey(10**9 + i) for i in range(4)))
    home = max(pod.pod_id for pod in PODS if pod.pod_id in owned)
    drive(policy, 0.2, 31.0, count=600)
    outside = next(pod.pod_id for pod in PODS if pod.pod_id not in policy._groups.owned.get(keys(1)[-1], ()))
    for holder in (home, outside):
        views = [replace(pod, matched_tokens=1900 if pod.pod_id == holder else 0) for pod in PODS]
        assert PODS[choose(policy, RequestInfo(chain, 2000, 95.0), views).pod].pod_id == holder


def test_a_pod_that_joins_is_not_flooded_until_it_has_caught_up() -> None:
    policy = groups_policy()
    before, joined = PODS[:2], PODS[:3]
    for i in range(400):
        choose(policy, RequestInfo(keys(100 + i), 1000, i * 0.05), before)
    taken = Counter(
        joined[choose(policy, RequestInfo(keys(1000 + i), 1000, 20 + i * 0.05), joined).pod].pod_id for i in range(90)
    )
    assert taken[PODS[2].pod_id] <= 45


def test_a_pod_that_comes_back_takes_its_share_at_once() -> None:
    policy = groups_policy()
    pods, without = PODS[:4], PODS[:3]
    for i in range(400):
        choose(policy, RequestInfo(keys(100 + i), 1000, i * 0.05), pods)
    for i in range(20):
        choose(policy, RequestInfo(keys(600 + i), 1000, 20 + i * 0.05), without)
    taken = Counter(
        pods[choose(policy, RequestInfo(keys(700 + i), 1000, 21 + i * 0.05), pods).pod].pod_id for i in range(100)
    )
    assert 10 <= taken[PODS[3].pod_id] <= 50
