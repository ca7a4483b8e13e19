"""The arms, the order in which they run, and the number of rounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.experiment.arms import DEFAULT_POLICIES, ArmSpec, arms_of, baseline_of, block_order
from loadgen.experiment.stopping import Stopping

GATEWAY = "http://gateway:8080"


def test_policies_of_one_gateway() -> None:
    arms = arms_of(f"{GATEWAY}/", ["round_robin", "predicted_ttft"], [], [])
    assert arms == (
        ArmSpec("round_robin", GATEWAY, "round_robin"),
        ArmSpec("predicted_ttft", GATEWAY, "predicted_ttft"),
    )
    assert tuple(arm.policy for arm in arms_of(GATEWAY, [], [], [])) == DEFAULT_POLICIES


def test_deployments_and_their_pods() -> None:
    arms = arms_of(
        GATEWAY,
        ["round_robin"],
        ["service=http://vllm:8000", "ours=https://other;affinity_groups"],
        ["service=http://pod-a:8000", "service=http://pod-b:8000/metrics", "http://all:1"],
    )
    assert arms == (
        ArmSpec("round_robin", GATEWAY, "round_robin", ("http://all:1",)),
        ArmSpec(
            "service",
            "http://vllm:8000",
            "",
            ("http://pod-a:8000", "http://pod-b:8000/metrics", "http://all:1"),
        ),
        ArmSpec("ours", "https://other", "affinity_groups", ("http://all:1",)),
    )
    assert [arm.name for arm in arms_of("", [], ["a=http://a", "b=http://b"], [])] == ["a", "b"]


def test_administrations_belong_to_one_arm_or_to_all() -> None:
    two = ["a=http://a", "b=http://b"]
    assert [arm.admin_url for arm in arms_of("", [], two, [], ["b=http://b:81/"])] == ["", "http://b:81"]
    assert [arm.admin_url for arm in arms_of("", [], two, [], ["http://all:81"])] == ["http://all:81"] * 2


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("", [], [], []), "are needed for a comparison"),
        (("", ["round_robin"], ["a=http://a"], []), "--policies needs --url"),
        (("gateway:80", [], [], []), "--url: got 'gateway:80'; the address must begin with http"),
        (("", [], ["http://a"], []), "must be NAME=URL"),
        (("", [], ["a="], []), "must be NAME=URL"),
        (("", [], ["a=b:80"], []), "--arm a: got 'b:80'"),
        (("", [], ["a=http://a", "a=http://b"], []), "arm a is listed twice"),
        ((GATEWAY, ["x", "x"], [], []), "arm x is listed twice"),
        (("", [], ["a=http://a"], ["b=http://pod"]), "b is not an arm; arms are a"),
        (("", [], ["a=http://a"], ["pod:80"]), "--metrics-urls: got 'pod:80'"),
        (("", [], ["a=http://a"], [], ["b=http://pod"]), "--admin-url 'b=http://pod': b is not an arm"),
        (("", [], ["a=http://a"], [], ["http://x", "a=http://y"]), "--admin-url gives a 2 addresses: one is enough"),
    ],
)
def test_flags_that_name_no_arms_are_refused(flags: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        arms_of(*flags)


def test_the_baseline() -> None:
    arms = arms_of(GATEWAY, ["predicted_ttft", "round_robin"], [], [])
    assert baseline_of(arms, "") == "round_robin"
    assert baseline_of(arms, "predicted_ttft") == "predicted_ttft"
    assert baseline_of(arms_of("", [], ["b=http://b", "a=http://a"], []), "") == "b"
    with pytest.raises(ValueError, match="--baseline x is not an arm; arms are predicted_ttft, round_robin"):
        baseline_of(arms, "x")


@given(count=st.integers(1, 6), rounds=st.integers(1, 5))
def test_a_steady_drift_cancels_over_two_rounds(count: int, rounds: int) -> None:
    arms = [ArmSpec(str(i), GATEWAY) for i in range(count)]
    order = [arm.name for number in range(2 * rounds) for arm in block_order(arms, number)]
    places = {arm.name: sum(i for i, name in enumerate(order) if name == arm.name) for arm in arms}
    assert len(set(places.values())) == 1
    assert order[: 2 * count] == [arm.name for arm in (*arms, *reversed(arms))]


def test_rounds_go_on_until_the_interval_is_narrow() -> None:
    stopping = Stopping(precision=0.1, max_rounds=9, max_time_s=1000)
    assert stopping.reason(1, 10, 0.01) is None, "one round is not ABBA"
    assert stopping.reason(2, 20, 0.11) is None
    assert "--precision" in str(stopping.reason(2, 20, 0.1))
    assert stopping.reason(3, 30, 0.01) is None, "after an odd round the interval would include a drift"
    assert "9 rounds" in str(stopping.reason(9, 90, 0.5))


def test_no_round_starts_that_would_end_too_late() -> None:
    stopping = Stopping(precision=0.1, max_rounds=9, max_time_s=100)
    assert stopping.reason(1, 50, 1) is None
    assert "--max-time 100 s" in str(stopping.reason(1, 51, 1))
    assert stopping.reason(3, 75, 1) is None
    assert "--max-time 100 s" in str(stopping.reason(3, 76, 1))


def test_a_number_of_rounds_is_kept_whatever_the_interval() -> None:
    stopping = Stopping(precision=0.1, max_rounds=2, max_time_s=1e9, rounds=4)
    assert [stopping.reason(n, 1, 0.0) for n in (1, 2, 3)] == [None] * 3
    assert stopping.reason(4, 1, 9.0) == "the 4 rounds asked for"
    assert Stopping(0.1, 9, 1e9, rounds=1).reason(1, 1, 9.0) == "the one round asked for"
