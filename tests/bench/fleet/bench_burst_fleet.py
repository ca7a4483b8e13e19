"""A burst on emulated pods in real time, compared with the same burst in the simulator.

    python -m tests.bench.fleet.bench_burst_fleet [--groups 64] [--pods 8] [--repeats 3]

The processes are real: engines with `--device sim` as `demo-fleet` starts them, a gateway, a Redis, and this process as
the load generator. The prompts are those of the policy table's `gsp_burst`, 1,024 by default: groups of 16 that share a
system prompt. All are sent at the same instant to empty caches. In virtual time, only the profile's formula, queueing
and 1 ms of network each way take time; the rest is the cost of this machine's cores. Compare on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
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
from loadgen.simulate import scenario
from loadgen.simulate.build import emulated_pods
from loadgen.simulate.fleet import FleetSpec
from loadgen.workloads.published import GeneratedSharedPrefix, PrefixRepetition
from loadgen.workloads.render import Renderer
from tests.bench.fleet.bench_sim_fleet import cpu_seconds, empty_caches, row, ttft_of

AT_ONCE = ArrivalSpec(ArrivalKind.BURST, math.inf)
WARM, WARM_REQUESTS, WARM_RATE = PrefixRepetition(), 64, 16.0
"""Workload, requests and requests/s before the bursts. They open connections, warm up tokenizers, and let the gateway
learn about the model."""
LIMIT = 0.15
"""Share by which the measured mean may exceed the simulator's."""


def made(given: argparse.Namespace, repeat: int) -> GeneratedSharedPrefix:
    """Return the prompts of a burst."""
    return GeneratedSharedPrefix(seed=repeat, num_groups=given.groups, output_len=given.output_tokens)


async def real(given: argparse.Namespace, logs: Path) -> list[tuple[ArmRun, Mapping[str, float]]]:
    """Return each burst with the CPU seconds of each kind of process."""
    with scratch_folder() as scratch, Children(logs) as children:
        spec = StackSpec(given.pods, emulated_engines(given.profile), None, scratch)
        url = await start_stack(spec, children, Steps(print))
        return await children.guard(bursts(given, url, children))


async def bursts(
    given: argparse.Namespace, url: GatewayUrls, children: Children
) -> list[tuple[ArmRun, Mapping[str, float]]]:
    found: list[tuple[ArmRun, Mapping[str, float]]] = []
    async with Client(Target(url.clients, policy=given.policy, extra={"ignore_eos": True})) as client:
        await client.model_id()
        renderer = Renderer(await measure_tokens_per_word(client, 1))
        arrivals = ArrivalSpec(ArrivalKind.POISSON, WARM_RATE)
        await play(client, WARM, renderer, RunSpec(arrivals, 1, 60.0, WARM_REQUESTS))
        for repeat in range(1, given.repeats + 1):
            await empty_caches(url)
            await asyncio.sleep(1.0)
            gc.collect()
            before = cpu_seconds(children)
            workload = made(given, repeat)
            spec = RunSpec(AT_ONCE, seed=repeat, time_limit_s=given.limit_s, sessions=workload.length)
            run = await play(client, workload, renderer, spec)
            after = cpu_seconds(children)
            found.append((run, {kind: after[kind] - before[kind] for kind in after}))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--groups", type=int, default=64, help="number of groups; the 16 requests of a group share a system prompt"
    )
    parser.add_argument("--pods", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", default="h100-8b", help="built-in profile or YAML file")
    parser.add_argument("--policy", default="predicted_ttft")
    parser.add_argument("--output-tokens", type=int, default=256, help="tokens of each answer, one event per token")
    parser.add_argument("--limit-s", type=float, default=120.0, help="seconds for a burst")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as logs:
        runs = uvloop.run(real(given, Path(logs)))
    fleet = FleetSpec(emulated_pods(given.pods, given.profile, max_running=EMULATED_RUNNING))
    above = []
    for repeat, (run, cpu_s) in enumerate(runs, start=1):
        workload = made(given, repeat)
        assert workload.length is not None
        simulated = scenario.play(scenario.Scenario(fleet, workload, AT_ONCE, workload.length, repeat), given.policy)
        mine_s, formula_s = ttft_of(run.records), ttft_of(simulated.records)
        above.append(float(np.mean(mine_s) / np.mean(formula_s)) - 1)
        print(f"\nburst {repeat}: {int(run.records.completed.sum())} of {workload.length} answered;", end=" ")
        print(", ".join(f"{kind} {seconds:.1f} s of CPU" for kind, seconds in sorted(cpu_s.items())))
        print(f"{'TTFT ms':24} {'mean':>7} {'p50':>7} {'p90':>7} {'p99':>7}")
        print(f"{'measured':24} {row(mine_s)}")
        print(f"{'formula, virtual time':24} {row(formula_s)}")
    middle = statistics.median(above)
    print(f"\nthe median burst's mean is {middle:.0%} above the simulator's (at most {LIMIT:.0%})")


if __name__ == "__main__":
    main()
