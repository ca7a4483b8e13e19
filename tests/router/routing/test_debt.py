"""The ledger behind further copies of a popular prefix."""

from __future__ import annotations

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


def test_a_queue_that_is_long_by_chance_buys_no_copy() -> None:
    """The pod with the prefix is 5 ms behind the other one as often as it is ahead."""
    policy = make_policy("predicted_ttft")
    cost = StepCost(token_s=1e-4)
    chosen = []
    for i in range(60):
        now_s = i * 0.01
        request = RequestInfo((*KEYS[:3], PrefixKey(100 + i)), 400, now_s)
        behind_s = (0.005, 0.0) if i % 2 else (0.0, 0.005)
        pods = [
            PodView(PodId("a"), matched_tokens=300, cost=cost, prefill_free_at_s=now_s + behind_s[0]),
            PodView(PodId("b"), cost=cost, prefill_free_at_s=now_s + behind_s[1]),
        ]
        chosen.append(policy.choose(request, pods).pod)
    assert set(chosen) == {0}
