"""Tenants that take less than others are recognized, and their requests are not held back. Pods have given loads."""

from __future__ import annotations

import math

from engine.contract.load import LoadReport
from router.overload.flow import Waiting
from router.overload.line import Line, LineLimits
from router.overload.saturation import CONTENDED_S, ROOM_S, SPARING_ROOM_S, Cap
from router.overload.shares import HALF_LIFE_S, WITHIN, Shares
from router.views.pod_state import PodState
from router.views.types import PodId

MOST = 32


class Loaded(PodState):
    """A pod with exactly the given seconds of prefill left and the given number of requests."""

    __slots__ = ("left_s", "running")

    def __init__(self, left_s: float, running: int) -> None:
        super().__init__()
        self.left_s, self.running = left_s, running

    def queue_s(self, now_s: float) -> float:
        return self.left_s

    def requests(self, now_s: float) -> int:
        return self.running


class Pod:
    def __init__(self, *, left_s: float = 0.0, running: int = 0, in_flight: int = 0) -> None:
        self.pod_id = PodId("pod-0")
        self.state: PodState = Loaded(left_s, running)
        self.cap = Cap()
        self.in_flight = in_flight


def waiting(flow: str, *, tokens: int = 100, weight: float = 1.0, priority: int = 0) -> Waiting:
    return Waiting(flow, weight, priority, tokens, 1, 0.0, 1e6)


def let_go(line: Line, pod: Pod, now_s: float) -> str | None:
    """Let the next request go, if any may, and return its flow."""
    release = line.next([pod], now_s, lambda request, avoided: 0.0)
    return None if release is None else release.request.flow


def crowded(*small: Waiting, taken: int = 20) -> Line:
    """Return a line in which `greedy` got `taken` requests, each of `small` got one, and more requests of `greedy`
    wait."""
    line = Line(LineLimits(1000, 2**20, MOST))
    for request in (*small, *(waiting("greedy") for _ in range(2 * taken))):
        line.enter(request, 0.0)
    for _ in range(taken + len(small)):
        assert let_go(line, Pod(), 0.0) is not None
    return line


def test_a_flow_with_less_for_its_weight_than_another_is_within_its_share() -> None:
    shares = Shares()
    assert not shares.is_within("a", 0.0)
    assert not shares.are_uneven(0.0)
    shares.let_go("b", 100.0, 0.0)
    assert shares.is_within("a", 0.0)
    assert not shares.is_within("b", 0.0)
    shares.let_go("a", 100.0 * WITHIN + 1, 0.0)
    assert not shares.is_within("a", 0.0)
    assert not shares.are_uneven(0.0)


def test_what_was_let_go_long_ago_counts_no_more() -> None:
    shares = Shares()
    shares.let_go("b", 1000.0, 0.0)
    shares.let_go("a", 500.0, HALF_LIFE_S)
    assert not shares.is_within("a", HALF_LIFE_S)
    assert not shares.are_uneven(HALF_LIFE_S)
    later_s = HALF_LIFE_S * (2 + math.log2(1000))
    assert not shares.is_within("a", later_s)
    assert not shares.is_within("c", later_s)


def test_a_flow_within_its_share_goes_where_the_greedy_one_has_no_room() -> None:
    for pod in (Pod(left_s=SPARING_ROOM_S), Pod(left_s=0.9 * CONTENDED_S), Pod(running=MOST - 1)):
        line = crowded(waiting("small"))
        assert let_go(line, pod, 0.0) is None
        line.enter(waiting("small"), 0.0)
        assert let_go(line, pod, 0.0) == "small"
        assert let_go(line, pod, 0.0) is None


def test_what_a_pod_takes_at_all_holds_for_everyone() -> None:
    line = crowded(waiting("small"))
    line.enter(waiting("small"), 0.0)
    for pod in (Pod(left_s=CONTENDED_S), Pod(running=MOST)):
        assert let_go(line, pod, 0.0) is None
    assert let_go(line, Pod(), 0.0) == "small"
    assert let_go(line, Pod(), 0.0) == "greedy"


def test_a_flow_alone_gets_all_the_room() -> None:
    line = crowded()
    assert let_go(line, Pod(left_s=(SPARING_ROOM_S + ROOM_S) / 2, running=MOST - 1), 0.0) == "greedy"
    assert let_go(line, Pod(left_s=ROOM_S), 0.0) is None


def test_a_lower_priority_is_held_although_its_flow_is_within_its_share() -> None:
    line = crowded(waiting("small"))
    line.enter(waiting("small", priority=-1), 0.0)
    assert let_go(line, Pod(left_s=SPARING_ROOM_S), 0.0) is None
    assert let_go(line, Pod(), 0.0) == "greedy"


def test_a_flow_that_turns_greedy_is_soon_held_like_the_others() -> None:
    line = crowded(taken=20)
    for _ in range(100):
        line.enter(waiting("new"), 0.0)
    busy = Pod(left_s=SPARING_ROOM_S)
    went = 0
    while let_go(line, busy, 0.0) == "new":
        went += 1
    assert went == math.ceil(20 * WITHIN)


def test_two_greedy_flows_get_as_much_however_late_one_of_them_came() -> None:
    line = crowded(taken=20)
    flows: list[str | None] = []
    for number in range(1000):
        line.enter(waiting("new"), 0.01 * number)
        line.enter(waiting("greedy"), 0.01 * number)
        flows.append(let_go(line, Pod(left_s=number % 2 * SPARING_ROOM_S), 0.01 * number))
    later = [flow for flow in flows[500:] if flow is not None]
    assert len(later) >= 250
    assert abs(later.count("new") - later.count("greedy")) <= 0.15 * len(later)


def test_a_flow_may_take_more_by_its_weight() -> None:
    line = Line(LineLimits(1000, 2**20, MOST))
    for _ in range(40):
        line.enter(waiting("heavy", weight=3.0), 0.0)
        line.enter(waiting("light"), 0.0)
    flows = [let_go(line, Pod(), 0.0) for _ in range(40)]
    assert abs(flows.count("heavy") - 30) <= 2
    while let_go(line, Pod(left_s=SPARING_ROOM_S), 0.0) == "light":
        flows.append("light")
    assert flows.count("light") <= 1 + math.ceil(flows.count("heavy") / 3)


def test_reserved_places_are_a_part_of_what_was_learnt_too() -> None:
    for reports in (True, False):
        pod = Pod(running=MOST - 1, in_flight=MOST - 1)
        if reports:
            pod.cap.reported(LoadReport(running=MOST, waiting=1), 1.0)
        else:
            pod.cap.refused(MOST, 0.0)
        line = Line(LineLimits(1000, 2**20))
        for flow in ("small", *["greedy"] * 10):
            line.enter(waiting(flow), 0.0)
        for _ in range(6):
            assert let_go(line, Pod(), 0.0) is not None
        assert let_go(line, pod, 0.0) is None
        line.enter(waiting("small"), 0.0)
        assert let_go(line, pod, 0.0) == "small"
