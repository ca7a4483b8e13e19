"""A fleet of emulated pods on this machine: the rate it serves, the cost, and whether emulation keeps time.

    python -m tests.bench.fleet.bench_sim_fleet [--rate 300] [--output-tokens 16] [--pods 16]

All processes are real: engines with `--device sim`, a gateway, a Redis, and this process as the load generator. The
same prompts at the same times are then played in virtual time (`loadgen.simulate`), in which only the profile's
formula, queueing and 1 ms of network each way take time. The difference is the cost of so few cores.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import uvloop

from loadgen.demo.children import Children
from loadgen.demo.stack import (
    EMULATED_RUNNING,
    GatewayUrls,
    StackSpec,
    Steps,
    emulated_engines,
    scratch_folder,
    start_stack,
)
from loadgen.load.arrivals import ArrivalKind, ArrivalSpec
from loadgen.load.calibrate import measure_tokens_per_word
from loadgen.load.client import Client
from loadgen.load.player import ArmRun, RunSpec, play
from loadgen.load.target import Target
from loadgen.measure.columns import Floats
from loadgen.measure.records import Records
from loadgen.simulate import scenario
from loadgen.simulate.build import emulated_pods
from loadgen.simulate.fleet import FleetSpec
from loadgen.workloads.base import Workload
from loadgen.workloads.published import PrefixRepetition
from loadgen.workloads.render import Renderer

SEED, WARM_S, FIRST = 1, 3.0, 10**6


@dataclass(frozen=True, slots=True)
class Case:
    """The load and the fleet."""

    pods: int
    profile: str
    policy: str
    rate: float
    seconds: float
    workload: Workload

    @property
    def arrivals(self) -> ArrivalSpec:
        return ArrivalSpec(ArrivalKind.POISSON, self.rate)

    @property
    def requests(self) -> int:
        return round(self.rate * self.seconds)


async def real(case: Case, logs: Path) -> tuple[ArmRun, Mapping[str, float]]:
    """Return the run, and the CPU seconds of each kind of process in it."""
    with scratch_folder() as scratch, Children(logs) as children:
        spec = StackSpec(case.pods, emulated_engines(case.profile), None, scratch)
        url = await start_stack(spec, children, Steps(print))
        return await children.guard(loaded(case, url, children))


async def empty_caches(url: GatewayUrls) -> None:
    """Empty the cache of every pod. Raises AssertionError if a pod refuses."""
    async with Client(Target(url.admin)) as admin:
        refused = await admin.reset_prefix_cache()
    assert refused is None, refused


async def loaded(case: Case, url: GatewayUrls, children: Children) -> tuple[ArmRun, Mapping[str, float]]:
    async with Client(Target(url.clients, policy=case.policy, extra={"ignore_eos": True})) as client:
        await client.model_id()
        renderer = Renderer(await measure_tokens_per_word(client, SEED))
        warm = round(WARM_S * case.rate / 2)
        await play(client, case.workload, renderer, RunSpec(case.arrivals, SEED, 30.0, warm, FIRST))
        await empty_caches(url)
        await asyncio.sleep(1.0)
        gc.collect()
        before = cpu_seconds(children)
        spec = RunSpec(case.arrivals, seed=SEED, time_limit_s=case.seconds + 30, sessions=case.requests)
        run = await play(client, case.workload, renderer, spec)
        after = cpu_seconds(children)
    return run, {kind: after[kind] - before[kind] for kind in after}


def cpu_seconds(children: Children) -> dict[str, float]:
    """Return user and system time so far by kind of process."""
    total = {"load generator": sum(psutil.Process().cpu_times()[:2])}
    for child in children.running():
        kind = child.name.partition("-")[0]
        total[kind] = total.get(kind, 0.0) + sum(psutil.Process(child.pid).cpu_times()[:2])
    return total


def virtual(case: Case) -> Floats:
    """Return TTFT in seconds of the same requests if computing takes no time on this machine."""
    fleet = FleetSpec(emulated_pods(case.pods, case.profile, max_running=EMULATED_RUNNING))
    found = scenario.play(scenario.Scenario(fleet, case.workload, case.arrivals, case.requests, SEED), case.policy)
    return ttft_of(found.records)


def ttft_of(records: Records) -> Floats:
    return (records.first_token_s - records.intended_s)[records.completed]


def show(case: Case, run: ArmRun, cpu_s: Mapping[str, float], formula_s: Floats) -> None:
    records = run.records
    done = int(records.completed.sum())
    print(f"\noffered {case.rate:g} requests/s, completed {done / run.duration_s:.1f}/s: {done} of {run.planned}")
    print(f"answers: {records.output_tokens.sum() / run.duration_s:,.0f} tokens/s, prompts:", end=" ")
    print(f"{np.mean(records.prompt_tokens[records.completed]):.0f} tokens each,", end=" ")
    print(f"{records.cached_tokens.sum() / max(1, records.prompt_tokens.sum()):.0%} cached")
    for kind, seconds in sorted(cpu_s.items()):
        print(f"  {kind:15} {seconds / run.duration_s:5.2f} cores  {seconds / max(1, done) * 1e3:6.2f} ms a request")
    print(f"  {'all':15} {sum(cpu_s.values()) / run.duration_s:5.2f} cores of {len(os.sched_getaffinity(0))}")
    lag_ms = np.quantile(records.lag_s, (0.5, 0.99)) * 1e3
    print(f"load generator late by {lag_ms[0]:.2f} ms at p50, {lag_ms[1]:.2f} ms at p99")
    print(f"{'TTFT ms':24} {'mean':>7} {'p50':>7} {'p90':>7} {'p99':>7}")
    for name, ttft_s in (("measured", ttft_of(records)), ("formula, virtual time", formula_s)):
        print(f"{name:24} {row(ttft_s)}")


def row(seconds: Floats) -> str:
    values = (np.mean(seconds), *np.quantile(seconds, (0.5, 0.9, 0.99)))
    return " ".join(f"{value * 1e3:7.1f}" for value in values)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pods", type=int, default=16)
    parser.add_argument("--rate", type=float, default=300.0, help="requests per second offered")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of the open-loop run")
    parser.add_argument("--profile", default="h100-8b", help="built-in profile or YAML file")
    parser.add_argument("--policy", default="predicted_ttft")
    parser.add_argument("--prefixes", type=int, default=64, help="shared prefixes")
    parser.add_argument("--prefix-tokens", type=int, default=512)
    parser.add_argument("--suffix-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=16, help="tokens of each answer, one event per token")
    given = parser.parse_args()
    workload = PrefixRepetition(
        seed=SEED,
        prefix_len=given.prefix_tokens,
        suffix_len=given.suffix_tokens,
        num_prefixes=given.prefixes,
        output_len=given.output_tokens,
    )
    case = Case(given.pods, given.profile, given.policy, given.rate, given.seconds, workload)
    with tempfile.TemporaryDirectory() as logs:
        run, cpu_s = uvloop.run(real(case, Path(logs)))
    show(case, run, cpu_s, virtual(case))


if __name__ == "__main__":
    main()
