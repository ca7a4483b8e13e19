"""Emulated pods with tiers: what the pool has lost comes back, from another pod too, and gateways are told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.tiers.place import Place
from engine.tiers.stats import LookupEnd
from loadgen.measure.records import RequestRecord
from loadgen.simulate.build import emulated_pods
from loadgen.simulate.fleet import FleetSpec, Simulation
from loadgen.simulate.pod_tiers import TierSpec
from loadgen.workloads.base import Piece
from tests.loadgen.simulate.hand_made import TRACE, Listed, Told, one

PROMPT = Piece("asked again", 4000)
HOST, SHARED = TierSpec(100_000, 50.0), TierSpec(100_000, 50.0, 50.0)


def served(tiers: TierSpec | None, route: list[str]) -> tuple[RequestRecord, Told, Simulation]:
    """The prompt, others that push it out of the pool, and the prompt again; requests go to the pods of `route`."""
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
    """The other pod has learnt what computing costs, but served no such prompt."""
    for tiers, cached in ((HOST, 0), (SHARED, 3984)):
        last, _, simulation = served(tiers, ["pod-0"] * 4 + ["pod-1"])
        assert last.cached_tokens == cached
        pod = simulation.pods["pod-1"]
        assert pod.tiers is not None
        assert pod.tiers.stats.hit_tokens[Place.SHARED] == cached
        assert pod.tiers.stats.lookups[LookupEnd.FOUND] == (cached > 0)


def test_a_fleet_without_a_folder_has_no_shared_tier() -> None:
    pods = tuple(replace(pod, tiers=SHARED) for pod in emulated_pods(2, kv_tokens=8000))
    with pytest.raises(ValueError, match="need a fleet with shared_tokens"):
        Simulation(FleetSpec(pods), Listed(()), TRACE, sessions=0, seed=1, on_record=lambda record: None)
