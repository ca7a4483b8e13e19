"""Emulated pods with tiers: blocks evicted from the pool come back, also on another pod, and gateways learn of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.tiers.stores.place import Place
from engine.tiers.stores.stats import LookupEnd
from loadgen.measure.records import RequestRecord
from loadgen.simulate.build import emulated_pods
from loadgen.simulate.fleet import FleetSpec, Simulation
from loadgen.simulate.pods.tiers import TierSpec
from loadgen.workloads.base import Piece
from tests.loadgen.simulate.hand_made import TRACE, Listed, Told, one

PROMPT = Piece("asked again", 4000)
HOST, SHARED = TierSpec(100_000, 50.0), TierSpec(100_000, 50.0, 50.0)


def served(tiers: TierSpec | None, route: list[str]) -> tuple[RequestRecord, Told, Simulation]:
    """Send the prompt, others that push it out of the pool, and the prompt again, to the pods of `route`."""
    pods = tuple(replace(pod, tiers=tiers) for pod in emulated_pods(2, kv_tokens=8000))
    learns = [one(n, n * 0.5, Piece(f"u{n}", 300 + 157 * n), output=2) for n in range(20)]
    others = [one(20 + n, 20 + n, PROMPT if n in (0, 4) else Piece(f"o{n}", 4000), output=2) for n in range(5)]
    records: list[RequestRecord] = []
    spec = FleetSpec(pods, shared_tokens=100_000)
    simulation = Simulation(spec, Listed((*learns, *others)), TRACE, sessions=25, seed=1, on_record=records.append)
    router = Told(["pod-0", "pod-1"] * 10 + route, takes_reports=True)
    simulation.run([router])
    assert len(records) == 25
    assert not any(record.failure for record in records)
    last = max(records, key=lambda record: record.session)
    return last, router, simulation


@pytest.mark.parametrize("tiers", [None, HOST, SHARED], ids=["none", "host", "shared"])
def test_what_the_pool_has_lost_comes_back_from_below(tiers: TierSpec | None) -> None:
    last, router, _ = served(tiers, ["pod-0"] * 5)
    assert last.first_token_s is not None
    assert last.cached_tokens == (3984 if tiers is not None else 0)
    below = {key for _, _, report in router.reports for key in report.below[0]}
    assert bool(below) == (tiers is not None)
    assert any(report.load.fetch.host.token_s > 0 for _, _, report in router.reports) == (tiers is not None)


def test_another_pod_has_it_only_by_the_shared_folder() -> None:
    """The other pod knows the cost of computing, but has not served such a prompt."""
    for tiers, cached in ((HOST, 0), (SHARED, 3984)):
        last, _, simulation = served(tiers, ["pod-0"] * 4 + ["pod-1"])
        assert last.cached_tokens == cached
        pod = simulation.pods["pod-1"]
        assert pod.tiers is not None
        assert pod.tiers.stats.hit_tokens[Place.SHARED] == cached
        assert pod.tiers.stats.lookups[LookupEnd.FOUND] == (cached > 0)


def beside_an_answer(tiers: TierSpec, *, pushed_out: bool) -> RequestRecord:
    """Send the prompt again with unique words after it, to a pod that is in the middle of a long answer."""
    pods = tuple(replace(pod, tiers=tiers) for pod in emulated_pods(1, kv_tokens=8000))
    learns = [one(n, n * 0.5, Piece(f"u{n}", 300 + 157 * n), output=2) for n in range(20)]
    others = [one(21 + n, 21 + n, Piece(f"o{n}", 3500), output=2) for n in range(2 * pushed_out)]
    number = 21 + len(others)
    sessions = (
        *learns,
        one(20, 20, PROMPT, output=2),
        *others,
        one(number, 30, Piece("long", 100), output=500),
        one(number + 1, 30.5, PROMPT, Piece("own", 150), output=2),
    )
    records: list[RequestRecord] = []
    spec = FleetSpec(pods, shared_tokens=100_000)
    Simulation(spec, Listed(sessions), TRACE, sessions=len(sessions), seed=1, on_record=records.append).run([Told()])
    return max((record for record in records if record.intended_s == 30.5), key=lambda record: record.session)


@pytest.mark.parametrize("gb_s", [2.0, 5.0, 12.0, 20.0, 50.0])
@pytest.mark.parametrize("pushed_out", [False, True], ids=["in the pool", "in host memory"])
def test_a_shared_folder_delays_no_prompt_that_is_nearer(gb_s: float, pushed_out: bool) -> None:
    """The unique words are not in the folder, and steps do not wait for a search for them."""
    without, beside = (
        beside_an_answer(TierSpec(100_000, 50.0, shared), pushed_out=pushed_out) for shared in (0.0, gb_s)
    )
    assert without.cached_tokens == beside.cached_tokens == 4000
    assert without.first_token_s is not None
    assert beside.first_token_s is not None
    assert beside.first_token_s - beside.intended_s <= 1.02 * (without.first_token_s - without.intended_s)


def test_a_fleet_without_a_folder_has_no_shared_tier() -> None:
    pods = tuple(replace(pod, tiers=SHARED) for pod in emulated_pods(2, kv_tokens=8000))
    with pytest.raises(ValueError, match="need a fleet with shared_tokens"):
        Simulation(FleetSpec(pods), Listed(()), TRACE, sessions=0, seed=1, on_record=lambda record: None)
