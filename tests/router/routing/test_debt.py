"""The ledger behind further copies of a popular prefix."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.contract.keys import PrefixKey
from engine.contract.load import StepCost
from router.routing.debt import Debts
from router.routing.policies import make_policy
from router.routing.types import PodId, PodView, RequestInfo

KEYS = tuple(PrefixKey(i) for i in range(1, 33))


def test_a_debt_fades_and_is_found_by_matches_of_about_its_length() -> None:
    debts = Debts()
    assert debts.account(KEYS, 0) is None
    account = debts.account(KEYS, 20)
    assert account is not None
    debts.book(account, 4.0, 0.0)
    assert [debts.account(KEYS, strides) for strides in (20, 21, 23)] == [account] * 3
    assert debts.account(KEYS, 30) != account
    assert debts.owed_s(account, 10.0) == pytest.approx(2.0)
    debts.book(account, 0.0, 10.0)
    assert debts.owed_s(account, 10.0) == 0.0


def test_a_prefix_is_copied_once_waiting_has_cost_as_much_as_the_copy() -> None:
    """One pod holds the prefix and is always 5 ms behind; a copy on the idle one costs 30 ms."""
    policy = make_policy("predicted_ttft")
    cost = StepCost(token_s=1e-4)
    chosen = []
    for i in range(12):
        now_s = i * 0.01
        request = RequestInfo((*KEYS[:3], PrefixKey(100 + i)), 400, now_s)
        holder = PodView(PodId("a"), matched_tokens=300, cost=cost, prefill_free_at_s=now_s + 0.005)
        chosen.append(policy.choose(request, [holder, PodView(PodId("b"), cost=cost)]).pod)
    assert chosen[:3] == [0, 0, 0]
    assert chosen.count(1) in (1, 2)


def test_a_choice_between_two_pods_is_worth_a_copy_once_it_has_spared_as_much() -> None:
    """The pod with the prefix is 5 ms behind the other one as often as it is ahead: with a copy no request waits."""
    behind = [(0.005, 0.0) if i % 2 else (0.0, 0.005) for i in range(60)]
    chosen = _with_one_holder(behind)
    assert 4 <= chosen.index(1) <= 16
    assert chosen.count(1) == 1, "the debt is paid"


def test_a_prefix_whose_pod_is_never_behind_is_not_copied() -> None:
    assert set(_with_one_holder([(0.004, 0.005)] * 200)) == {0}


def _with_one_holder(behind_s: Sequence[tuple[float, float]]) -> list[int]:
    """Where requests go of which pod 0 holds 300 of 400 tokens and pod 1 nothing, with these waits; until a copy."""
    policy = make_policy("predicted_ttft")
    cost = StepCost(token_s=1e-4)
    chosen: list[int] = []
    for i, waits_s in enumerate(behind_s):
        now_s = i * 0.01
        request = RequestInfo((*KEYS[:3], PrefixKey(100 + i)), 400, now_s)
        pods = [
            PodView(PodId("a"), matched_tokens=300, cost=cost, prefill_free_at_s=now_s + waits_s[0]),
            PodView(PodId("b"), cost=cost, prefill_free_at_s=now_s + waits_s[1]),
        ]
        chosen.append(policy.choose(request, pods).pod)
        if chosen[-1]:
            break
    return chosen


def test_what_a_copy_saves_its_own_request_is_not_paid_from_the_debt() -> None:
    """Each of three requests would wait 25 ms for the pod with the prefix, and a copy costs 30 ms: the debt of the
    first buys a copy for the second, and what is left of it one for the third.
    """
    policy = make_policy("predicted_ttft")
    cost = StepCost(token_s=1e-4)
    holders: list[int] = [0]
    chosen = []
    for i in range(3):
        request = RequestInfo((*KEYS[:3], PrefixKey(100 + i)), 400, i / 1000)
        pods = [
            PodView(
                PodId(name),
                matched_tokens=300 if number in holders else 0,
                cost=cost,
                prefill_free_at_s=request.now_s + (0.025 if number in holders else 0.0),
            )
            for number, name in enumerate("abc")
        ]
        chosen.append(policy.choose(request, pods).pod)
        holders.append(chosen[-1])
    assert chosen[0] == 0
    assert sorted(chosen) == [0, 1, 2]
