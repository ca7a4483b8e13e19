"""A fleet in virtual time: 64 pods and 100,000 requests within 3 minutes of one core.

    python -m tests.bench.fleet.bench_simulate [--pods 64] [--requests 100000] [--arm predicted_ttft]

Prompts have about 2,200 tokens, most of which are one of 8 prefixes per pod. Answers have 256 tokens. Each pod gets 10
requests/s. The figure is CPU time, so that other work on the machine has little effect.
"""

from __future__ import annotations

import argparse
import time

from loadgen.load.arrivals import ArrivalKind, ArrivalSpec
from loadgen.measure.summary import summarise
from loadgen.simulate.build import emulated_pods
from loadgen.simulate.fleet import FleetSpec
from loadgen.simulate.scenario import Scenario, play
from loadgen.workloads.published import GeneratedSharedPrefix

TARGET_MS = 1.8
"""CPU milliseconds per request: 3 minutes for 100,000."""
PER_POD = 10.0


def main() -> None:
    """Play the fleet once and print its CPU time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=64, help="emulated pods (64)")
    parser.add_argument("--requests", type=int, default=100_000, help="requests (100000)")
    parser.add_argument("--arm", default="predicted_ttft", help="router (predicted_ttft)")
    options = parser.parse_args()
    groups = 8 * options.pods
    workload = GeneratedSharedPrefix(seed=1, num_groups=groups, prompts_per_group=-(-options.requests // groups))
    arrivals = ArrivalSpec(ArrivalKind.POISSON, PER_POD * options.pods)
    scenario = Scenario(FleetSpec(emulated_pods(options.pods)), workload, arrivals, options.requests, seed=1)
    begun = time.process_time()
    run = play(scenario, options.arm)
    simulated_s = time.process_time() - begun
    summary = summarise(run, scenario.pods())
    whole_s = time.process_time() - begun
    each_ms = 1e3 * whole_s / summary.planned
    print(
        f"{options.arm}, {options.pods} pods, {summary.completed:,} of {summary.planned:,} requests completed,"
        f" {run.duration_s:.0f} virtual s: simulation {simulated_s:.1f} s of CPU, with the summary {whole_s:.1f} s,"
        f" {each_ms:.2f} ms a request, {each_ms / TARGET_MS:.2f} of the target"
    )


if __name__ == "__main__":
    main()
