"""One cell of the policy table: a router on a case with a seed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.backend.profiles import find_profile
from loadgen.load.arrivals import ArrivalKind, ArrivalSpec
from loadgen.measure.records import RequestRecord
from loadgen.simulate.arms import make_router
from loadgen.simulate.faults import FaultKind
from loadgen.simulate.fleet import FleetSpec, Simulation
from loadgen.simulate.omniscient import exact_cost
from loadgen.workloads.base import Workload
from router.views.latency import prefill_s
from tests.bench.policy_table.cases import PROFILE, Case

WARM_REQUESTS = 500
"""Requests served before the comparison with the omniscient arm begins."""
STRIDE = 256
KNEE_RUN_S = 60.0
MAX_RATE = 10_000.0
"""Sessions per second that no fleet of the table can serve."""
_PROFILE = find_profile(PROFILE)


@dataclass(frozen=True, slots=True)
class Cell:
    """The numbers of one run. Latencies are those of completed requests, from the intended time."""

    mean_ttft_ms: float
    p99_ttft_ms: float
    warm_mean_ttft_ms: float
    """Mean without the first `WARM_REQUESTS` requests."""
    unqueued_ttft_ms: float
    """Mean TTFT if no request had others before it on its pod: the network, half of a step in progress and one step of
    its own (each as long as its mean decode step), and its prefill. Shorter queues could at most save the difference
    from `mean_ttft_ms`."""
    mean_e2e_ms: float
    hit_rate: float
    """Cached / prompt tokens."""
    max_over_mean_load: float
    """For the fullest pod: its requests / an even share of the requests that came while it lived."""
    completed: int
    failed: int
    mean_tpot_ms: float = math.nan
    """Mean over the requests of the time per output token after the first; older files lack it."""


def run_cell(case: Case, arm: str, seed: int, knee: float) -> Cell:
    """Play the case once and return its numbers."""
    return measure(case.workload(seed), case.arrivals(knee), case.fleet(knee), arm, seed, case.requests, case.gateways)


def measure(
    workload: Workload, arrivals: ArrivalSpec, fleet: FleetSpec, arm: str, seed: int, requests: int, gateways: int = 1
) -> Cell:
    """Play a workload once, with at most `requests` sessions."""
    records: list[RequestRecord] = []
    sessions = min(requests, workload.length or requests)
    simulation = Simulation(fleet, workload, arrivals, sessions=sessions, seed=seed, on_record=records.append)
    simulation.run([make_router(arm, simulation, 1000 * seed + i, STRIDE) for i in range(gateways)])
    return summary(records, fleet)


def summary(records: list[RequestRecord], fleet: FleetSpec) -> Cell:
    """Return the numbers of a run."""
    records = sorted(records, key=lambda record: record.intended_s)
    done = [record for record in records if record.failure is None]
    ttft = np.array([1e3 * (r.first_token_s - r.intended_s) for r in done if r.first_token_s is not None])
    warm = [r.first_token_s - r.intended_s for r in records[WARM_REQUESTS:] if r.failure is None and r.first_token_s]
    prompt = sum(record.prompt_tokens for record in done)
    return Cell(
        mean_ttft_ms=float(ttft.mean()) if len(ttft) else math.nan,
        p99_ttft_ms=float(np.percentile(ttft, 99)) if len(ttft) else math.nan,
        warm_mean_ttft_ms=1e3 * float(np.mean(warm)) if warm else math.nan,
        unqueued_ttft_ms=float(np.mean([_unqueued_ms(record) for record in done])) if done else math.nan,
        mean_e2e_ms=1e3 * float(np.mean([r.finished_s - r.intended_s for r in done])) if done else math.nan,
        hit_rate=sum(record.cached_tokens for record in done) / prompt if prompt else 0.0,
        max_over_mean_load=_imbalance(done, fleet),
        completed=len(done),
        failed=len(records) - len(done),
        mean_tpot_ms=_mean_tpot_ms(done),
    )


def _mean_tpot_ms(done: Sequence[RequestRecord]) -> float:
    """See `Cell.mean_tpot_ms`. An answer of one token has no TPOT."""
    found = [
        1e3 * (r.finished_s - r.first_token_s) / (r.output_tokens - 1)
        for r in done
        if r.first_token_s is not None and r.output_tokens > 1
    ]
    return float(np.mean(found)) if found else math.nan


def _imbalance(done: Sequence[RequestRecord], fleet: FleetSpec) -> float:
    """See `Cell.max_over_mean_load`. Among the faults, only deaths change how many pods share a request."""
    died_s = {fault.pod: fault.at_s for fault in fleet.faults if fault.kind is FaultKind.DIE}
    shares = dict.fromkeys((pod.name for pod in fleet.pods), 0.0)
    for record in done:
        alive = [name for name in shares if record.intended_s < died_s.get(name, math.inf)]
        for name in alive:
            shares[name] += 1 / len(alive)
    served = Counter(record.pod for record in done)
    return max((served[name] / share for name, share in shares.items() if share), default=0.0)


def _unqueued_ms(record: RequestRecord) -> float:
    assert record.first_token_s is not None
    uncached = max(1, record.prompt_tokens - record.cached_tokens)
    prefill_ms = 1e3 * prefill_s(exact_cost(_PROFILE, 1.0), uncached, record.prompt_tokens)
    steps = max(1, record.output_tokens - 1)
    step_ms = max(_PROFILE.w0_ms, 1e3 * (record.finished_s - record.first_token_s) / steps)
    # A step takes at least `w0_ms`, to read the weights. A prefill costs nothing as long as it fits in the part of that
    # time which remains after `a_ms`.
    hidden_ms = min(prefill_ms, _PROFILE.w0_ms - _PROFILE.a_ms)
    return 2e3 * FleetSpec(()).network_s + 1.5 * step_ms + prefill_ms - hidden_ms


def find_knee(case: Case, seed: int = 1, run_s: float = KNEE_RUN_S) -> float:
    """Return the knee in sessions per second, within 4 %: double the rate, then halve the gap five times.

    At the knee, the omniscient arm's p99 TTFT is within ten times that of a nearly idle fleet, one of the criteria of
    `warmroute-loadgen sweep`. Runs last at least `run_s`.
    """

    def p99_ms(rate: float) -> float:
        sessions = max(case.requests, round(run_s * rate))
        arrivals = ArrivalSpec(ArrivalKind.POISSON, rate)
        cell = measure(case.workload(seed), arrivals, case.fleet(rate), "omniscient", seed, sessions)
        return cell.p99_ttft_ms

    low = 1.0
    limit_ms = 10 * p99_ms(low)
    high = 2 * low
    while p99_ms(high) <= limit_ms and high < MAX_RATE:
        low, high = high, 2 * high
    for _ in range(5):
        middle = (low + high) / 2
        low, high = (middle, high) if p99_ms(middle) <= limit_ms else (low, middle)
    return low
