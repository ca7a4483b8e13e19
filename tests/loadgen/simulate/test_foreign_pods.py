"""Gateways with pods that publish nothing and evict blocks, in virtual time."""

from __future__ import annotations

import statistics

import pytest

from engine.backend.profiles import SimProfile
from loadgen.load.arrivals import ArrivalKind, ArrivalSpec
from loadgen.measure.records import RequestRecord
from loadgen.simulate.arms import make_router
from loadgen.simulate.fleet import FleetSpec, Simulation
from loadgen.simulate.pods.noise import StepNoise
from loadgen.simulate.pods.pod import PodSpec
from loadgen.workloads.chat import Chat

PREFIXES, PREFIX_TOKENS, BLOCK = 24, 1490, 32
CPU = SimProfile("cpu", w0_ms=15.0, a_ms=15.0, c1_ms=0.13, c2_ms=1e-6, c3_ms=1e-4, c4_ms=1.0, kv_tokens=20_480)
"""Approximately a small model on a CPU: 0.2 s for a cold prefix."""


def attained(
    gateways: int,
    requests: int,
    seed: int,
    *,
    tells_capacity: bool = True,
    shares: bool = True,
    noise: StepNoise | None = None,
) -> float:
    """Return the reused tokens of prefixes, as a share of the reuse if each prefix is computed only once."""
    records: list[RequestRecord] = []
    tokens = PREFIX_TOKENS
    workload = Chat("two-pods", seed, PREFIXES, 0.0, tokens, tokens, 12, 18, turns_min=1, turns_max=1, output_tokens=4)
    fleet = FleetSpec(
        tuple(PodSpec(f"pod-{i}", CPU, block_size=BLOCK, noise=noise) for i in range(2)),
        publishes=False,
        tells_capacity=tells_capacity,
        shares=shares,
    )
    arrivals = ArrivalSpec(ArrivalKind.CLOSED, concurrency=3)
    simulation = Simulation(fleet, workload, arrivals, sessions=requests, seed=seed, on_record=records.append)
    simulation.run([make_router("predicted_ttft", simulation, 1000 * seed + i, 256) for i in range(gateways)])
    reusable = PREFIX_TOKENS // BLOCK * BLOCK
    assert len(records) == requests
    reused = sum(min(record.cached_tokens, reusable) for record in records)
    return reused / (reusable * (requests - len({record.group for record in records})))


@pytest.mark.parametrize("requests", [192, 384])
@pytest.mark.parametrize("gateways", [1, 2, 4])
def test_prefixes_that_just_fit_stay_where_they_are(gateways: int, requests: int) -> None:
    found = [attained(gateways, requests, seed) for seed in range(1, 6)]
    assert statistics.fmean(found) >= 0.97, found


@pytest.mark.parametrize("gateways", [1, 2])
def test_pods_that_differ_by_noise_alone_are_taken_for_equal(gateways: int) -> None:
    """Step times vary by about a factor of two, both from step to step and between spells of two seconds, as on a
    machine that does other work. With constants fitted to each pod separately, only 0.96 of the reuse was attained (24
    seeds)."""
    noises = [StepNoise(step=0.5, spell=0.6, common=0.5, seed=seed) for seed in range(1, 9)]
    found = [attained(gateways, 192, noise.seed, noise=noise) for noise in noises]
    assert statistics.median(found) >= 0.97, found
    assert statistics.fmean(found) >= 0.97, found


def test_it_takes_sharing() -> None:
    found = [attained(2, 192, seed, shares=False) for seed in range(1, 6)]
    assert statistics.fmean(found) < 0.9, found


def test_pods_that_tell_no_capacity_cost_little_more() -> None:
    found = [attained(2, 384, seed, tells_capacity=False) for seed in range(1, 6)]
    assert statistics.fmean(found) >= 0.95, found
