"""The overload queue in virtual time: who is served in time, and that the queue changes nothing below saturation.

    python -m tests.bench.fleet.bench_overload [--seeds 1 2] [--seconds 30] [--parts below goodput tenants priorities]

The fleet has four emulated h100-8b pods. `decode`: shared prefixes of about 1,300 tokens, answers of 80 to 256 tokens:
the batch is the bottleneck. `prefill`: 2,048 unshared tokens: computing is the bottleneck. A request is served in time
if its first token comes within 2 s, and each further token within 100 ms on average. Equal options print equal tables.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from engine.backend.profiles import find_profile
from loadgen.load.arrivals import ArrivalKind, ArrivalSpec
from loadgen.measure.records import RequestRecord
from loadgen.simulate.fleet import FleetSpec, Simulation
from loadgen.simulate.gateway import Gateway
from loadgen.simulate.pods.pod import PodSpec
from loadgen.workloads.base import Workload
from loadgen.workloads.published import GeneratedSharedPrefix
from router.overload.line import LineLimits
from tests.bench.fleet.overload_arm import STRIDE, Asked, Queued
from tests.bench.policy_table.cases import KNEES, SYNTHETIC, zero_sharing
from tests.bench.policy_table.run import summary

TTFT_S, TPOT_S = 2.0, 0.1
TIMEOUT_S = 1.7
"""Seconds for which a request may wait in the queue if it names no limit: 2 s minus the time on a busy pod."""
PODS = 4
CAPACITY = {"decode": 149.0, "prefill": 57.0}
"""Requests per second: the highest rate tried at which all requests were in time without the queue."""
WARM_S = 8.0
"""Seconds at the beginning that do not count: the gateway needs two seconds to notice that all pods are saturated."""
BELOW = ("gsp_90", "zipf_90", "tenants_90", "multi_90", "zero_75", "one50_85", "gateways_4")
TENANTS = (
    ("decode", 1, 0, 0.25),
    ("decode", 1, 128, 0.1),
    ("decode", 3, 128, 0.1),
    ("prefill", 1, 0, 0.25),
    ("prefill", 1, 0, 0.1),
    ("prefill", 3, 0, 0.1),
)
"""Workload, gateways, limit of requests per pod, if any, and the tenant's demand relative to the capacity."""
PARTS = ("below", "goodput", "tenants", "priorities")

Records = list[RequestRecord]


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that decides a run, except its requests."""

    kind: str
    seed: int
    seconds: float
    gateways: int = 1
    pod_requests: int = 0
    timeout_s: float = TIMEOUT_S


ARMS: tuple[Callable[[int], Asked] | None, ...] = (
    None,
    lambda _: Asked(has_goal=False),
    lambda _: Asked(),
    lambda _: Asked(ttft_slo_s=TTFT_S),
)
"""No queue, a queue that keeps everybody for `timeout_s`, a queue that sheds when it stands, times asked for."""


def workload(kind: str, seed: int, requests: int) -> Workload:
    """Return one of the workloads in CAPACITY."""
    if kind == "prefill":
        return zero_sharing(seed)
    prompts = math.ceil(requests / 32) + 1
    return GeneratedSharedPrefix(seed=seed, num_groups=32, prompts_per_group=prompts, range_ratio=0.3)


def flow_of(flows: list[str], number: int) -> Asked:
    return Asked(flows[number])


def priority_of(drawn: list[int], number: int) -> Asked:
    return Asked(priority=drawn[number])


def play(setting: Setting, rate: float, asked: Callable[[int], Asked] | None) -> Records:
    """Return the records of a run; `asked` None: without the queue."""
    requests = round(rate * setting.seconds)
    profile = find_profile("h100-8b")
    fleet = FleetSpec(tuple(PodSpec(f"pod-{i}", profile, block_size=64) for i in range(PODS)))
    records: Records = []
    simulation = Simulation(
        fleet,
        workload(setting.kind, setting.seed, requests),
        ArrivalSpec(ArrivalKind.POISSON, rate),
        sessions=requests,
        seed=setting.seed,
        on_record=records.append,
    )
    limits = LineLimits(1024, 2**26, setting.pod_requests)
    simulation.run([_router(simulation, asked, setting.timeout_s, limits) for _ in range(setting.gateways)])
    return [record for record in records if record.intended_s >= WARM_S]


def _router(
    simulation: Simulation, asked: Callable[[int], Asked] | None, timeout_s: float, limits: LineLimits
) -> Gateway:
    if asked is None:
        return Gateway("predicted_ttft", simulation.timeline, stride=STRIDE)
    return Queued(simulation, asked, timeout_s=timeout_s, limits=limits)


def in_time(records: Sequence[RequestRecord]) -> int:
    """Count the requests that were served in time."""
    return sum(
        ttft_s(record) <= TTFT_S
        and (record.finished_s - (record.first_token_s or 0.0)) / max(1, record.output_tokens - 1) <= TPOT_S
        for record in records
        if record.failure is None
    )


def ttft_s(record: RequestRecord) -> float:
    """Return seconds to the first token; infinite for a refused request."""
    if record.failure is not None or record.first_token_s is None:
        return math.inf
    return record.first_token_s - record.intended_s


def p99_ms(records: Sequence[RequestRecord]) -> float:
    """Return the 99th percentile of the time to first token, which is infinite for a refused request."""
    return 1e3 * float(np.percentile([ttft_s(record) for record in records], 99, method="higher"))


# -- the parts ------------------------------------------------------------------------------------------------------


def below(seeds: Sequence[int]) -> None:
    """Print cases of the policy table with and without the queue."""
    print("| case | held | mean TTFT without, with | p99 |\n|---|--:|--:|--:|")
    cases = {case.name: case for case in SYNTHETIC}
    for name in (*BELOW, "gsp_burst"):
        case = cases[name]
        knee = KNEES.get(case.knee_of, math.inf)  # a burst has no knee
        for seed in seeds:
            cells, held = [], 0
            for asked in (None, lambda _: Asked()):
                records: Records = []
                load, sessions = case.workload(seed), case.requests
                simulation = Simulation(
                    case.fleet(knee), load, case.arrivals(knee), sessions=sessions, seed=seed, on_record=records.append
                )
                limits = LineLimits(1024, 2**26)
                routers = [_router(simulation, asked, 60.0, limits) for _ in range(case.gateways)]
                simulation.run(routers)
                cells.append(summary(records, case.fleet(knee)))
                held = sum(router.held for router in routers if isinstance(router, Queued))
            without, queued = cells
            print(
                f"| {name} | {held} of {queued.completed} | {without.mean_ttft_ms:.1f}, {queued.mean_ttft_ms:.1f} ms "
                f"| {without.p99_ttft_ms:.0f}, {queued.p99_ttft_ms:.0f} |",
                flush=True,
            )


def goodput(seeds: Sequence[int], seconds: float) -> None:
    """Print how much is served in time at several loads."""
    print("| workload | gateways | offered / capacity | without | queue that keeps all | queue | times asked for |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for kind, capacity in CAPACITY.items():
        for gateways, loads in ((1, (0.75, 1.0, 1.5, 2.0, 4.0)), (3, (1.0, 2.0, 4.0))):
            for load in loads:
                rates: list[list[float]] = []
                for asked in ARMS:
                    runs = [
                        play(Setting(kind, seed, seconds, gateways, timeout_s=10.0), load * capacity, asked)
                        for seed in seeds
                    ]
                    rates.append([in_time(run) / (seconds - WARM_S) / capacity for run in runs])
                shown = " | ".join(", ".join(f"{rate:.2f}" for rate in of_arm) for of_arm in rates)
                print(f"| {kind} | {gateways} | {load:g} | {shown} |", flush=True)


def tenants(seeds: Sequence[int], seconds: float) -> None:
    """Print latencies of a tenant that keeps to its share (half of the capacity), alone and beside a tenant that
    demands ten times as much."""
    print("| workload | gateways | requests a pod | asks for | p50, p99 alone | beside 10 x | ratio | served in all |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for kind, gateways, most, part in TENANTS:
        rate = part * CAPACITY[kind]
        for seed in seeds:
            setting = Setting(kind, seed, seconds, gateways, most)
            draws = random.Random(seed)
            flows = ["a" if draws.random() < 1 / 11 else "b" for _ in range(round(11 * rate * seconds))]
            alone = play(setting, rate, lambda _: Asked("a"))
            crowd = play(setting, 11 * rate, partial(flow_of, flows))
            beside = [record for record in crowd if flows[record.session] == "a"]
            served = sum(record.failure is None for record in crowd) / (seconds - WARM_S)
            print(
                f"| {kind} | {gateways} | {most or 'any'} | {part:g} | {_shown(alone)} | {_shown(beside)} "
                f"| {p99_ms(beside) / p99_ms(alone):.2f} | {served / CAPACITY[kind]:.2f} of capacity |",
                flush=True,
            )


def _shown(records: Sequence[RequestRecord]) -> str:
    median = 1e3 * float(np.percentile([ttft_s(record) for record in records], 50, method="higher"))
    return f"{median:.0f}, {p99_ms(records):.0f} ms"


def priorities(seeds: Sequence[int], seconds: float) -> None:
    """Print three priorities, each of which demands the whole capacity."""
    print("| workload | gateways | served of each priority (1, 0, -1) / capacity | p99 of each |\n|---|--:|--:|--:|")
    for kind, gateways in (("decode", 1), ("decode", 3), ("prefill", 1), ("prefill", 3)):
        for seed in seeds:
            draws = random.Random(seed)
            drawn = [draws.choice((1, 0, -1)) for _ in range(round(3 * CAPACITY[kind] * seconds))]
            setting = Setting(kind, seed, seconds, gateways)
            records = play(setting, 3 * CAPACITY[kind], partial(priority_of, drawn))
            served, late = [], []
            for priority in (1, 0, -1):
                done = [r for r in records if drawn[r.session] == priority and r.failure is None]
                served.append(f"{len(done) / (seconds - WARM_S) / CAPACITY[kind]:.2f}")
                late.append(f"{p99_ms(done):.0f}" if done else "-")
            print(f"| {kind} | {gateways} | {', '.join(served)} | {', '.join(late)} ms |", flush=True)


def main() -> None:
    """Print the requested tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    for part in options.parts:
        print(f"\n{part}\n")
        if part == "below":
            below(options.seeds[:1])
        else:
            {"goodput": goodput, "tenants": tenants, "priorities": priorities}[part](options.seeds, options.seconds)


if __name__ == "__main__":
    main()
