"""The set of full pods is kept current: whatever happens to pods, it equals what a scan of all pods finds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.contract.load import LoadReport, StepCost
from router.fleet.pod import Pod, TrackedRequest
from router.fleet.probe import PodIdentity
from router.overload.full import NO_PODS, FullPods
from router.overload.line import Line, LineLimits
from router.overload.saturation import CONTENDED_S, FORGET_S, GROW_S, SATURATED_S, is_full, is_saturated
from router.views.reported import FRESH_S, STALE_S
from router.views.types import PodId

PODS = 5
SLOW = StepCost(base_s=0.01, token_s=0.001)


def made(name: str) -> Pod:
    return Pod(f"http://{name}:80", PodIdentity(PodId(name), None, ()))


def scan(pods: Sequence[Pod], most: int, now_s: float) -> frozenset[PodId]:
    return frozenset(pod.pod_id for pod in pods if is_full(pod, most, now_s))


class Kept(RuleBasedStateMachine):
    """Plays requests, reports, refusals and time, on pods that come and go."""

    @initialize(most=st.sampled_from((0, 0, 1, 3)))
    def begin(self, most: int) -> None:
        self.now_s = 100.0
        self.most = most
        self.all = [made(f"pod-{i}") for i in range(PODS)]
        self.pods: Sequence[Pod] = tuple(self.all)
        self.open: list[tuple[Pod, TrackedRequest]] = []
        self.full = FullPods(most)
        self.line = Line(LineLimits(10, 1000, most))
        self.sent = 0

    @rule(pod=st.integers(0, PODS - 1), tokens=st.integers(1, 2000))
    def send(self, pod: int, tokens: int) -> None:
        self.sent += 1
        tracked = TrackedRequest(
            self.all[pod],
            str(self.sent),
            prompt_tokens=tokens,
            uncached_tokens=tokens,
            output_tokens=10,
            streams=bool(self.sent % 3),
            clock=lambda: self.now_s,
        )
        tracked.__enter__()
        self.open.append((self.all[pod], tracked))

    @rule(place=st.integers(0, 99), is_over=st.booleans())
    def answer(self, place: int, is_over: bool) -> None:
        if not self.open:
            return
        place %= len(self.open)
        if is_over:
            self.open.pop(place)[1].__exit__()
        else:
            self.open[place][1].first_token(0)

    @rule(pod=st.integers(0, PODS - 1), running=st.integers(0, 5), waiting=st.integers(0, 3))
    def report(self, pod: int, running: int, waiting: int) -> None:
        load = LoadReport(running=running, waiting=waiting, uncached_tokens=100 * waiting, cost=SLOW)
        self.all[pod].report(load, now_s=self.now_s)

    @rule(pod=st.integers(0, PODS - 1))
    def refuse(self, pod: int) -> None:
        self.all[pod].cap.refused(self.all[pod].in_flight, self.now_s)

    @rule(passed_s=st.sampled_from((0.0, 0.05, 0.3, GROW_S, FRESH_S, (STALE_S - FRESH_S) / 2, STALE_S, FORGET_S)))
    def wait(self, passed_s: float) -> None:
        self.now_s += passed_s

    @rule(kept=st.sets(st.integers(0, PODS - 1), min_size=1))
    def choose_among(self, kept: set[int]) -> None:
        self.pods = tuple(self.all[i] for i in sorted(kept))

    @rule(pod=st.integers(0, PODS - 1))
    def restart(self, pod: int) -> None:
        self.all[pod] = made(f"pod-{pod}")
        self.pods = tuple(self.all)

    @invariant()
    def as_a_scan_finds_them(self) -> None:
        if not hasattr(self, "full"):
            return
        found = scan(self.pods, self.most, self.now_s)
        assert self.full.at(self.pods, self.now_s) == found
        passed = self.line.passes("", 0, self.pods, self.now_s)
        limit_s = CONTENDED_S if self.now_s < self.line._contended_until_s else SATURATED_S
        has_room = any(
            not is_saturated(pod, limit_s, self.now_s) and not is_full(pod, self.most, self.now_s) for pod in self.pods
        )
        assert passed == (found if has_room else None)

    def teardown(self) -> None:
        if hasattr(self, "full"):
            self.full.at((), self.now_s)
            self.line.passes("", 0, (), self.now_s)
            assert all(not pod.state._watchers and not pod.cap._watchers for pod in self.all)


TestKept = Kept.TestCase


@pytest.mark.parametrize("most", [0, 4])
def test_a_look_asks_none_of_the_pods_to_which_nothing_has_happened(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def counted(pod: Pod, most: int, now_s: float, reserved: float = 0.0) -> bool:
        asked.append(pod)
        return is_full(pod, most, now_s, reserved)

    monkeypatch.setattr("router.overload.full.is_full", counted)
    pods = tuple(made(f"pod-{i:04}") for i in range(1000))
    full, now_s = FullPods(most), 100.0
    pods[7].cap.refused(1, now_s)
    assert full.at(pods, now_s) == NO_PODS
    asked.clear()
    pods[7].in_flight = 1
    pods[7].state.sent("1", prompt_tokens=10, uncached_tokens=10, output_tokens=10, now_s=now_s)
    assert full.at(pods, now_s) == {pods[7].pod_id}
    assert set(asked) == {pods[7]}
    asked.clear()
    assert full.at(pods, now_s + FORGET_S) == NO_PODS
    assert asked == [pods[7]]


def test_the_next_request_looks_first_where_the_last_one_found_room(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[PodId] = []

    def counted(pod: Pod, limit_s: float, now_s: float) -> bool:
        asked.append(pod.pod_id)
        return pod.pod_id < "pod-0003"

    monkeypatch.setattr("router.overload.line.is_saturated", counted)
    pods = tuple(made(f"pod-{i:04}") for i in range(5))
    line = Line(LineLimits(10, 1000))
    for _ in range(2):
        assert line.passes("", 0, pods, 100.0) == NO_PODS
    assert asked == [f"pod-{i:04}" for i in (0, 1, 2, 3, 3)]
    assert line.passes("", 0, pods[:2], 100.0) is None
