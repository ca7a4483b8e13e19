"""The ledger that decides about further copies of a popular prefix: time that requests lost by waiting is a debt."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.keys import PrefixKey
from engine.contract.load import StepCost
from router.routing.policies import make_policy
from router.routing.replication import Ledger
from router.views.pod_partition import PodPartition
from router.views.types import Decision, PodId, RequestInfo
from tests.router.routing.pods import Made, choose

KEYS = tuple(PrefixKey(i) for i in range(1, 33))


def test_a_debt_fades_and_is_found_by_matches_of_about_its_length() -> None:
    ledger = Ledger()
    assert ledger.booked_under(KEYS, 0) is None
    prefix = ledger.booked_under(KEYS, 20)
    assert prefix is not None
    ledger.book(prefix, 4.0, 0.0)
    assert [ledger.booked_under(KEYS, strides) for strides in (20, 21, 23)] == [prefix] * 3
    assert ledger.booked_under(KEYS, 30) != prefix
    assert ledger.owed_s(prefix, 10.0) == pytest.approx(2.0)
    ledger.book(prefix, 0.0, 10.0)
    assert ledger.owed_s(prefix, 10.0) == 0.0


def test_a_prefix_is_copied_once_waiting_has_cost_as_much_as_the_copy() -> None:
    """Only one pod holds the prefix, and it always has a queue of 5 ms. A copy on the idle pod costs 30 ms."""
    policy = make_policy("predicted_ttft")
    cost = StepCost(token_s=1e-4)
    chosen = []
    for i in range(12):
        now_s = i * 0.01
        request = RequestInfo((*KEYS[:3], PrefixKey(100 + i)), 400, now_s)
        holder = Made(PodId("a"), matched_tokens=300, cost=cost, free_at_s=now_s + 0.005)
        chosen.append(choose(policy, request, [holder, Made(PodId("b"), cost=cost)]).pod)
    assert chosen[:3] == [0, 0, 0]
    assert chosen.count(1) in (1, 2)


def test_a_choice_between_two_pods_is_worth_a_copy_once_it_has_spared_as_much() -> None:
    """In half of the cases the pod with the prefix has a queue of 5 ms; in the others, the other pod has a queue. So
    with a copy no request waits."""
    behind = [(0.005, 0.0) if i % 2 else (0.0, 0.005) for i in range(60)]
    chosen = _with_one_holder(behind)
    assert 4 <= chosen.index(1) <= 16
    assert chosen.count(1) == 1, "the debt is paid"


def test_a_prefix_whose_pod_is_never_behind_is_not_copied() -> None:
    assert set(_with_one_holder([(0.004, 0.005)] * 200)) == {0}


def _with_one_holder(behind_s: Sequence[tuple[float, float]]) -> list[int]:
    """Return the pods that requests go to, with these waits, until a copy is made. Pod 0 holds 300 of their 400 tokens,
    and pod 1 holds nothing."""
    policy = make_policy("predicted_ttft")
    cost = StepCost(token_s=1e-4)
    chosen: list[int] = []
    for i, waits_s in enumerate(behind_s):
        now_s = i * 0.01
        request = RequestInfo((*KEYS[:3], PrefixKey(100 + i)), 400, now_s)
        pods = [
            Made(PodId("a"), matched_tokens=300, cost=cost, free_at_s=now_s + waits_s[0]),
            Made(PodId("b"), cost=cost, free_at_s=now_s + waits_s[1]),
        ]
        chosen.append(choose(policy, request, pods).pod)
        if chosen[-1]:
            break
    return chosen


def test_what_a_copy_saves_its_own_request_is_not_paid_from_the_debt() -> None:
    """Each of three requests would wait 25 ms for the pod with the prefix, and a copy costs 30 ms. The debt of the
    first request buys a copy for the second, and the rest of the debt buys a copy for the third.
    """
    policy = make_policy("predicted_ttft")
    cost = StepCost(token_s=1e-4)
    holders: list[int] = [0]
    chosen = []
    for i in range(3):
        request = RequestInfo((*KEYS[:3], PrefixKey(100 + i)), 400, i / 1000)
        pods = [
            Made(
                PodId(name),
                matched_tokens=300 if number in holders else 0,
                cost=cost,
                free_at_s=request.now_s + (0.025 if number in holders else 0.0),
            )
            for number, name in enumerate("abc")
        ]
        chosen.append(choose(policy, request, pods).pod)
        holders.append(chosen[-1])
    assert chosen[0] == 0
    assert sorted(chosen) == [0, 1, 2]


@pytest.mark.parametrize("is_synced", [False, True])
def test_another_gateways_copy_pays_the_debt_if_gateways_tell_each_other(is_synced: bool) -> None:
    """If they do not, each gateway counts only what its own requests lose, whatever another gateway copies."""
    policy, cost = make_policy("predicted_ttft"), StepCost(token_s=1e-4)
    partition = PodPartition(0.0, 0.5, 0.0, (0.5,), is_synced=is_synced)
    decision: Decision | None = None
    for i, holders in enumerate(["a", "a", "ac"]):
        now_s = i * 0.01
        pods = [
            Made(PodId(name), matched_tokens=300, cost=cost, free_at_s=now_s + 0.005)
            if name in holders
            else Made(PodId(name), cost=cost)
            for name in "abc"
        ]
        request = RequestInfo((*KEYS[:3], PrefixKey(100 + i)), 400, now_s, partition=partition)
        decision = choose(policy, request, pods, explain=True)
        assert choose(policy, request, pods).pod in (0, 2)
    assert decision is not None
    assert (decision.scores[1].parts["replication_s"] < 0) is not is_synced


def _copied_at(gateways: int, copies: int) -> int:
    """Return the number of the request that makes the last of `copies` further copies. The gateways send in turn. Pods
    that hold the prefix have a queue of 5 ms, and the others have none."""
    policies = [make_policy("predicted_ttft") for _ in range(gateways)]
    cost, holders = StepCost(token_s=1e-4), {0}
    for i in range(1000):
        now_s, gateway = i * 0.1, i % gateways
        low, high = gateway / gateways, (gateway + 1) / gateways
        borders = tuple(n / gateways for n in range(1, gateways))
        partition = PodPartition(low, high, 0.0, borders, is_synced=True) if gateways > 1 else None
        request = RequestInfo((*KEYS[:3], PrefixKey(100 + i)), 400, now_s, partition=partition)
        pods = [
            Made(PodId(str(number)), matched_tokens=300, cost=cost, free_at_s=now_s + 0.005)
            if number in holders
            else Made(PodId(str(number)), cost=cost)
            for number in range(8)
        ]
        holders.add(choose(policies[gateway], request, pods).pod)
        if len(holders) > copies:
            return i
    return 1000


@pytest.mark.parametrize("copies", [1, 4])
def test_several_gateways_copy_a_prefix_after_about_as_many_requests_as_one(copies: int) -> None:
    """A gateway knows its own share of the traffic, but not what the others' requests lose. It knows of another
    gateway's copy, and does not make one more for the same debt."""
    alone = _copied_at(1, copies)
    assert 3 * copies <= alone <= 20 * copies
    for gateways in (2, 4):
        assert 0.6 * alone <= _copied_at(gateways, copies) <= alone + copies * gateways


@given(high=st.floats(0.0, 1.0), gateways=st.integers(2, 8))
def test_a_request_stands_for_no_more_others_than_there_are_gateways(high: float, gateways: int) -> None:
    """Otherwise a gateway with hardly any traffic would copy a prefix for each millisecond that a request waits."""
    borders = tuple([high + (1 - high) * n / (gateways - 1) for n in range(gateways - 1)])
    partition = PodPartition(0.0, high, 0.0, borders, is_synced=True)
    assert partition.share >= 1 / gateways
    assert partition.share >= high
    assert partition._replace(is_synced=False).share == 1.0, "the other gateways make their own copies"


def test_a_copy_by_another_gateway_is_what_was_owed() -> None:
    ledger = Ledger()
    prefix = ledger.booked_under(KEYS, 20)
    assert prefix is not None
    ledger.book(prefix, 4.0, 0.0, lacking=7)
    assert ledger.owed_s(prefix, 0.0, lacking=7) == 4.0
    assert ledger.owed_s(prefix, 0.0, lacking=8) == 4.0, "one pod evicted the copy"
    assert ledger.owed_s(prefix, 0.0, lacking=6) == 0.0
    ledger.book(prefix, 4.0, 0.0, lacking=6)
    assert ledger.owed_s(prefix, 0.0, lacking=6) == 4.0, "what later requests lose is owed for the next copy"


@given(own=st.integers(1, 30))
def test_a_debt_pays_in_full_for_a_usual_prompt_and_in_part_for_a_longer_one(own: int) -> None:
    """Otherwise the longest requests would make the copies. A usual prompt has 300 shared tokens and 100 of its own."""
    policy = make_policy("predicted_ttft")
    cost = StepCost(token_s=1e-4)

    def ask(tokens: int, now_s: float, *, explain: bool) -> Decision:
        keys = (*KEYS[:3], *(PrefixKey(100 + i) for i in range(tokens // 100)))
        holder = Made(PodId("a"), matched_tokens=300, cost=cost, free_at_s=now_s + 0.005)
        pods = [holder, Made(PodId("b"), cost=cost)]
        return choose(policy, RequestInfo(keys, 300 + tokens, now_s), pods, explain=explain)

    for i in range(3):
        assert ask(100, i * 0.01, explain=False).pod == 0
    usual, other = (-ask(100 * count, 0.03, explain=True).scores[1].parts["replication_s"] for count in (1, own))
    assert usual > 0.01
    assert other == pytest.approx(usual * min(1.0, (300 + 100) / (300 + 100 * own)), rel=0.01)
