"""The trials do what they say, and every request still ends."""

from __future__ import annotations

import math

import pytest

from engine.backend.profiles import find_profile
from loadgen.load.arrivals import ArrivalKind, ArrivalSpec
from loadgen.measure.records import RequestRecord
from loadgen.simulate.arms import make_router
from loadgen.simulate.faults import Fault, FaultKind
from loadgen.simulate.fleet import FleetSpec, Simulation
from loadgen.simulate.pod import PodSpec
from loadgen.simulate.routing import HELD, Router
from loadgen.simulate.trials.trials import TRIALS
from loadgen.workloads.chat import Chat

REQUESTS, TENANTS = 96, 8
BURST = ArrivalSpec(ArrivalKind.POISSON, math.inf)


def play(arm: str, arrivals: ArrivalSpec = BURST, faults: tuple[Fault, ...] = ()) -> tuple[list[RequestRecord], int]:
    """Records of a run on three pods, and how often a request was held."""
    profile = find_profile("h100-8b")
    spec = FleetSpec(tuple(PodSpec(f"pod-{i}", profile, block_size=64) for i in range(3)), faults)
    chat = Chat("tenants", 5, TENANTS, 0.0, 2000, 2000, 200, 200, turns_min=1, turns_max=1, output_tokens=8)
    records: list[RequestRecord] = []
    simulation = Simulation(spec, chat, arrivals, sessions=REQUESTS, seed=5, on_record=records.append)
    router = make_router(arm, simulation, 5, 256)
    held = count_held(router)
    simulation.run([router])
    return records, len(held)


def count_held(router: Router) -> list[int]:
    choose, held = router.choose, []

    def counted(request, excluded, now_s):
        pod = choose(request, excluded, now_s)
        if pod == HELD:
            held.append(request.number)
        return pod

    router.choose = counted  # type: ignore[method-assign]
    return held


def hit_rate(records: list[RequestRecord]) -> float:
    return sum(record.cached_tokens for record in records) / sum(record.prompt_tokens for record in records)


@pytest.mark.parametrize("arm", sorted(TRIALS))
def test_every_request_is_answered(arm: str) -> None:
    records, _ = play(arm)
    assert len(records) == REQUESTS
    assert {record.failure for record in records} == {None}


@pytest.mark.parametrize("arm", ["trial_hold", "trial_hold_shortest"])
def test_requests_are_held_in_a_burst_and_not_on_an_idle_fleet(arm: str) -> None:
    assert play(arm)[1] > REQUESTS / 4
    assert play(arm, ArrivalSpec(ArrivalKind.POISSON, 2.0))[1] == 0


def test_held_requests_outlive_a_pod() -> None:
    records, held = play("trial_hold", faults=(Fault(0.3, FaultKind.DIE, "pod-1"),))
    assert held
    assert len(records) == REQUESTS
    assert {record.pod for record in records if record.failure} <= {"pod-1"}, "what it had begun to answer is lost"
    assert "pod-1" not in {record.pod for record in records if record.finished_s > 0.5}


def test_a_prefix_that_moved_is_not_computed_again() -> None:
    records, moved = play("trial_move_25", ArrivalSpec(ArrivalKind.POISSON, 10.0))
    assert moved > 0
    homes = {(record.group, record.pod) for record in records}
    cold = [record for record in records if record.cached_tokens == 0]
    assert TENANTS <= len(cold) < len(homes), "without moving, the first request of each home is cold"


def test_without_speculation_a_burst_is_scattered() -> None:
    assert hit_rate(play("no_speculation")[0]) < hit_rate(play("predicted_ttft")[0]) - 0.1
