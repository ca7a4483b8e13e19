"""Which pods each of several gateways tries first: its own part of the fleet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.load import StepCost
from router.routing.policies import make_policy
from router.routing.predicted_ttft import PredictedTtft
from router.views.pod_partition import EQUAL, LEAST_PART, Gateways, PodPartition, partition_of
from router.views.types import PodId, RequestInfo
from tests.router.routing.pods import Made, choose

COST = StepCost(base_s=6e-3, token_s=22e-6)
WORK = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 10.0), min_size=2)


def partition(own: str, work_s: dict[str, float], now_s: float = 0.0) -> PodPartition | None:
    gateways = Gateways(own)
    for name, seconds in work_s.items():
        if name == own:
            gateways.sent(seconds, now_s)
        else:
            gateways.heard(name, seconds, 0.07, now_s)
    return gateways.partition(now_s)


@given(WORK, st.integers(1, 40), st.floats(0, 1e6))
def test_every_pod_is_somebodys_own_and_nobodys_twice(work_s: dict[str, float], pods: int, now_s: float) -> None:
    total = sum(work_s.values())
    loud = {name: seconds for name, seconds in work_s.items() if seconds > 0.01 * total}
    found = {name: partition(name, work_s, now_s) for name in loud}
    if len(loud) < 2:
        assert not any(found.values())
        return
    for row in range(pods):
        assert sum(each.part(row, pods) for each in found.values() if each) == pytest.approx(1.0)
    for name, each in found.items():
        assert each is not None
        share, even = loud[name] / sum(loud.values()), 1 / len(loud)
        if all(
            abs(seconds * len(loud) - sum(loud.values())) <= EQUAL * sum(loud.values()) for seconds in loud.values()
        ):
            share = even
        assert each.high - each.low == pytest.approx(share, abs=1e-9) or abs(abs(share - even) - EQUAL * even) < 1e-9


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 300))
def test_own_rows_are_the_pods_of_which_a_part_is_its_own(one: float, other: float, pods: int) -> None:
    place = PodPartition(min(one, other), max(one, other), 0.0)
    parts = [place.part(row, pods) for row in range(pods)]
    own = place.own_rows(pods)
    assert sum(parts) == pytest.approx(place.own_pods(pods))
    for row, part in enumerate(parts):
        if abs(part - LEAST_PART) > 1e-6:  # at the limit itself rounding decides
            assert (row in own) == (part > LEAST_PART)


def test_a_gateway_alone_or_among_silent_ones_has_all() -> None:
    assert partition("a", {"a": 1.0}) is None
    assert partition("a", {"a": 1.0, "b": 0.001}) is None
    gateways = Gateways("a")
    gateways.heard("b", 1.0, 0.07, 0.0)
    gateways.sent(1.0, 1000.0)
    assert gateways.partition(1000.0) is None  # the last message from b is long past


def unseen_s(rate: float, delay_s: float, *, seconds: float = 200.0) -> float:
    """Return `unseen_s` for requests of 0.1 s of prefill; another gateway sends `rate` times this gateway's work."""
    gateways, now_s, sent = Gateways("a"), 0.0, 0.0
    while now_s < seconds:
        gateways.sent(0.1, now_s)
        while sent < now_s * rate:
            gateways.heard("b", 0.1, delay_s, now_s)
            sent += 0.1
        now_s += 0.1
    found = gateways.partition(seconds)
    assert found is not None
    return found.unseen_s


def test_unseen_work_grows_with_what_others_send_and_with_delay() -> None:
    assert unseen_s(1.0, 0.01) == pytest.approx(0.01, rel=0.05)  # of b's prefill, 10 ms are unseen
    assert unseen_s(2.0, 0.01) > unseen_s(1.0, 0.01) > unseen_s(1.0, 0.005) > 0


def test_unseen_work_is_known_from_the_first_seconds_on() -> None:
    assert unseen_s(1.0, 0.01, seconds=5.0) == pytest.approx(0.01, rel=0.2)


def test_at_most_one_request_of_other_gateways_is_counted_on_a_pod() -> None:
    """This holds however late gateways hear of each other. Otherwise each would leave the others' pods idle."""
    assert unseen_s(4.0, 1.0) == pytest.approx(0.1, rel=1e-6)


def test_two_gateways_that_see_the_same_do_not_choose_the_same_pod() -> None:
    pods = [Made(PodId(f"pod-{i}"), cost=COST) for i in range(4)]
    chosen = []
    for place in (PodPartition(0.0, 0.5, 0.05), PodPartition(0.5, 1.0, 0.05)):
        policy = make_policy("predicted_ttft")
        chosen.append(choose(policy, RequestInfo((), 2000, 0.0, partition=place), pods).pod)
    assert chosen[0] in (0, 1)
    assert chosen[1] in (2, 3)


def test_shares_that_differ_by_chance_are_even() -> None:
    for own, (low, high) in (("a", (0.0, 0.5)), ("b", (0.5, 1.0))):
        found = partition(own, {"a": 1.15, "b": 1.0})
        assert found is not None
        assert (found.low, found.high, found.borders) == (low, high, (0.5,))
    uneven = partition("a", {"a": 1.6, "b": 1.0})
    assert uneven is not None
    assert uneven.high == pytest.approx(1.6 / 2.6)


def chosen_by_guest(own: str, busy: set[int], pods: int, *, is_warm: bool) -> int:
    """Return the choice of gateway `own`, one of four, whose own pods are `busy`. All pods have been used in order."""
    views = [
        Made(
            PodId(f"pod-{i:02}"),
            matched_tokens=1900 * is_warm,
            cost=COST,
            in_flight=int(i in busy),
            free_at_s=10.0 * (i in busy),
        )
        for i in range(pods)
    ]
    policy = make_policy("predicted_ttft")
    assert isinstance(policy, PredictedTtft)
    for i in range(pods):
        policy.sent_elsewhere(PodId(f"pod-{i:02}"), 2000 + i, 0.1)
    place = partition_of(dict.fromkeys("abcd", 1.0), own, 0.01, is_synced=True)
    return choose(policy, RequestInfo((), 2000, 0.2, partition=place), views).pod


@pytest.mark.parametrize("is_warm", [False, True])
def test_guests_go_where_the_owner_goes_last_and_do_not_meet(is_warm: bool) -> None:
    """Each gateway owns three pods, which were used in order. The owner uses its first idle pod next, and a gateway
    without idle pods of its own (a guest) uses the last."""
    chosen = {}
    for place, own in enumerate("abcd"):
        busy = set(range(3 * place, 3 * place + 3))
        chosen[own] = chosen_by_guest(own, busy, 12, is_warm=is_warm)
    assert chosen == {"a": 5, "b": 8, "c": 11, "d": 2}


def test_a_guest_passes_by_a_gateway_that_has_one_idle_pod() -> None:
    """The owner may have taken that pod already, although it has not said so."""
    assert chosen_by_guest("a", {0, 1, 2, 3, 4}, 12, is_warm=True) == 8


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_pod_that_another_gateway_used_had_its_turn(is_warm: bool) -> None:
    """Among equal pods, the one used longest ago is next, whichever gateway used it."""
    pods = [Made(PodId(f"pod-{i}"), matched_tokens=1900 * is_warm, cost=COST) for i in range(4)]
    policy = make_policy("predicted_ttft")
    assert isinstance(policy, PredictedTtft)
    for pod in (0, 1, 3):
        policy.sent_elsewhere(PodId(f"pod-{pod}"), 2000, 0.1)
    assert choose(policy, RequestInfo((), 2000, 0.2), pods).pod == 2
    policy.sent_elsewhere(PodId("pod-2"), 9000, 0.3)
    policy.sent_elsewhere(PodId("pod-0"), 9000, 0.3)
    assert choose(policy, RequestInfo((), 2000, 0.4), pods).pod in (1, 3)


def test_fear_of_others_makes_no_copy() -> None:
    pods = [Made(PodId("pod-0"), cost=COST), Made(PodId("pod-1"), matched_tokens=1900, cost=COST)]
    request = RequestInfo((), 2000, 0.0, partition=PodPartition(0.0, 0.5, 10.0))
    assert choose(make_policy("predicted_ttft"), request, pods).pod == 1


def test_a_full_pod_is_left_alone_if_what_it_evicts_is_missed() -> None:
    pods = [
        Made(PodId("pod-0"), cost=COST, room_tokens=0.0),
        Made(PodId("pod-1"), cost=COST, room_tokens=5000.0, in_flight=1, decoding=1, free_at_s=0.03),
    ]
    policy = make_policy("predicted_ttft")
    assert choose(policy, RequestInfo((), 2000, 0.0), pods, explain=True).pod == 0
    decision = choose(policy, RequestInfo((), 2000, 0.0, regret=2.0), pods, explain=True)
    assert decision.pod == 1
    assert decision.scores[0].parts["evict_s"] == pytest.approx(2 * (2000 + 128) * COST.token_s)
    assert decision.scores[1].parts["evict_s"] == 0.0
