"""Which pods each gateway tries first, if pods report their load."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine.contract.keys import PrefixKey
from engine.contract.load import StepCost
from router.routing.policies import make_policy
from router.routing.prefill_shares import ModelShares, PrefillShares
from router.routing.shares import TrafficShares
from router.views.pod_partition import EQUAL, PodPartition
from router.views.types import PodId, RequestInfo
from tests.router.routing.pods import Made, choose

COST = StepCost(base_s=6e-3, token_s=22e-6)


def exchange(gateways: dict[str, PrefillShares], now_s: float) -> None:
    for name, gateway in gateways.items():
        work_s = gateway.export_s(now_s)
        for other in gateways.values():
            if other is not gateway:
                other.merge(name, work_s, now_s)


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 100.0), min_size=2),
    st.integers(1, 40),
    st.floats(0, 1e6),
    st.floats(0, 4.9),
)
def test_every_pod_is_somebodys_own_and_nobodys_twice(
    work_s: dict[str, float], pods: int, start_s: float, later_s: float
) -> None:
    total = sum(work_s.values())
    assume(all(abs(seconds / total - 0.01) > 1e-6 for seconds in work_s.values()))  # at the limit rounding decides
    gateways = {name: PrefillShares(name) for name in work_s}
    exchange(gateways, start_s)
    for name, seconds in work_s.items():
        gateways[name].sent(seconds)
    exchange(gateways, start_s)
    loud = {name: seconds for name, seconds in work_s.items() if seconds > 0.01 * total}
    found = {name: gateways[name].partition(start_s + later_s) for name in work_s}
    if len(loud) < 2:
        assert not any(found.values())
        return
    partings = {name: each for name, each in found.items() if each is not None}
    assert partings.keys() == loud.keys()
    for row in range(pods):
        assert sum(each.part(row, pods) for each in partings.values()) == pytest.approx(1.0)
    for name, each in partings.items():
        share, even = loud[name] / sum(loud.values()), 1 / len(loud)
        assert abs(each.own_pods(pods) / pods - share) <= EQUAL * even + 1e-9  # nearly even shares are taken as even


def test_a_gateway_that_tells_nothing_for_five_seconds_has_no_pods() -> None:
    shares = PrefillShares("a")
    assert shares.partition(0.0) is None
    shares.sent(1.0)
    shares.merge("b", 1.0, 0.0)
    shares.merge("c", 2.0, 3.0)
    found = shares.partition(3.0)
    assert found is not None
    assert found.high == pytest.approx(1 / (1 + 2 ** (-3 / 20) + 2), rel=1e-6)
    found = shares.partition(6.0)
    assert found is not None
    assert found.high == pytest.approx(1 / (1 + 2 * 2 ** (-3 / 20)), rel=1e-6)  # nothing was heard of b since 0.0
    assert shares.partition(8.1) is None


def test_unseen_work_grows_with_what_the_others_send() -> None:
    def unseen_s(rate: float) -> float:
        shares = PrefillShares("a")
        other = PrefillShares("b")
        for second in range(200):
            shares.sent(1.0)
            other.sent(rate)
            shares.merge("b", other.export_s(float(second)), float(second))
            shares.export_s(float(second))
        found = shares.partition(200.0)
        assert found is not None
        return found.unseen_s

    assert unseen_s(1.0) == pytest.approx(0.08, rel=0.05)  # of b's prefill, 0.08 s are unseen
    assert unseen_s(3.0) == pytest.approx(3 * unseen_s(1.0))


def test_one_exchange_serves_the_counters_of_prefixes_and_of_prefill() -> None:
    ours, theirs = (
        ModelShares(name, TrafficShares(half_life_s=30.0, limit=100, depth_strides=4)) for name in ("a", "b")
    )
    theirs.prefill.sent(1.0)
    ours.prefill.sent(3.0)
    assert theirs.traffic is not None
    assert ours.traffic is not None
    theirs.traffic.record((PrefixKey(7),), 1.0, 0.0)
    ours.merge("b", theirs.export(0.0), 0.0)
    assert ours.traffic.share(PrefixKey(7), 0.0) == pytest.approx(1.0)
    found = ours.prefill.partition(0.0)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((0.0, 0.75))
    without = ModelShares("c", None)
    without.prefill.sent(2.0)
    assert without.export(0.0).prefill_s == pytest.approx(2.0)
    without.merge("b", theirs.export(0.0), 0.0)
    assert without.prefill.partition(0.0) is not None


@pytest.mark.parametrize("held", [0, 900])
@pytest.mark.parametrize("gateways", [2, 3, 5, 8, 11])
def test_gateways_together_use_all_pods_alike(gateways: int, held: int) -> None:
    """This holds for equal pods, even if no gateway's part of the fleet is a whole number of pods."""
    pods = [Made(PodId(f"pod-{i}"), matched_tokens=held, cost=COST) for i in range(8)]
    chosen: Counter[int] = Counter()
    for number in range(gateways):
        place = PodPartition(number / gateways, (number + 1) / gateways, 0.5)
        policy = make_policy("predicted_ttft")
        for i in range(400):
            request = RequestInfo((), 1000, 0.001 * i, partition=place)
            chosen[choose(policy, request, pods).pod] += 1
    mean = 400 * gateways / 8
    assert min(chosen[i] for i in range(8)) > 0.9 * mean
    assert max(chosen.values()) < 1.1 * mean
