"""The value of tiers for a fleet, and what routing still gains with them: 8 pods in virtual time.

    python -m tests.bench.engine.bench_fleet_tiers [--requests 2400] [--seeds 1] [--out out/fleet_tiers.json]

The working set is three times the size of all pools: 192 prefixes of 2,000 tokens, 8 pools of 16,000 tokens (device
h100-8b). A session is one request with 100 to 200 unique tokens; answers have 32 tokens. `host`: each pod has host
memory for four times its pool, at 50 GB/s. `host + shared`: in addition, a folder holds the working set, and each pod
reads and writes it at 5 or 12 GB/s. Times to the first token are at an offered rate, throughput is with 32 concurrent
requests. The second half of each run counts. The bar: with a shared folder, no mean time is above 1.05 times the time
with host memory only.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from loadgen.load.arrivals import ArrivalKind, ArrivalSpec
from loadgen.simulate.build import emulated_pods
from loadgen.simulate.fleet import FleetSpec
from loadgen.simulate.pods.tiers import TierSpec
from loadgen.simulate.scenario import Scenario, SimulatedRun, play
from loadgen.workloads.chat import Chat

PODS, POOL_TOKENS, PREFIXES, PREFIX_TOKENS = 8, 16_000, 192, 2000
HOST_TOKENS, FOLDER_TOKENS = 4 * POOL_TOKENS, 480_000
TIERS = {
    "none": None,
    "host": TierSpec(HOST_TOKENS, 50.0),
    "host + shared, 5 GB/s": TierSpec(HOST_TOKENS, 50.0, 5.0),
    "host + shared, 12 GB/s": TierSpec(HOST_TOKENS, 50.0, 12.0),
}
POLICIES = ("round_robin", "predicted_ttft")
SHARED, MAX_OF_HOST = "shared", 1.05
RATE, CONCURRENCY = 100.0, 32


@dataclass(frozen=True)
class Row:
    """One arm: milliseconds to the first token, requests/s, and the share of prompt tokens that was not computed."""

    tiers: str
    policy: str
    mean_ms: float
    p99_ms: float
    requests_s: float
    cached: float


def scenario(tiers: TierSpec | None, arrivals: ArrivalSpec, requests: int, seed: int) -> Scenario:
    """Return the fleet and its traffic."""
    pods = tuple(replace(pod, tiers=tiers) for pod in emulated_pods(PODS, kv_tokens=POOL_TOKENS))
    shared = FOLDER_TOKENS if tiers is not None and tiers.shared_gb_s else 0
    chat = Chat("prefixes", seed, PREFIXES, 0.6, PREFIX_TOKENS, PREFIX_TOKENS, 100, 200, 1, 1, output_tokens=32)
    return Scenario(FleetSpec(pods, shared_tokens=shared), chat, arrivals, requests, seed)


def row(tiers: str, policy: str, requests: int, seeds: Sequence[int]) -> Row:
    """Play the arm at the rate and at the concurrency."""
    means, tails, rates, cached = [], [], [], []
    for seed in seeds:
        timed = late_half(play(scenario(TIERS[tiers], rate(), requests, seed), policy))
        means.append(1e3 * float(timed.ttft.mean()))
        tails.append(1e3 * float(np.quantile(timed.ttft, 0.99)))
        cached.append(timed.cached)
        closed = ArrivalSpec(ArrivalKind.CLOSED, concurrency=CONCURRENCY)
        rates.append(late_half(play(scenario(TIERS[tiers], closed, requests, seed), policy)).requests_s)
    return Row(tiers, policy, *(statistics.fmean(part) for part in (means, tails, rates, cached)))


def rate() -> ArrivalSpec:
    """Return the offered rate."""
    return ArrivalSpec(ArrivalKind.POISSON, RATE)


@dataclass(frozen=True)
class Half:
    """The second half of a run's requests."""

    ttft: np.ndarray[tuple[int], np.dtype[np.float64]]
    requests_s: float
    cached: float


def late_half(run: SimulatedRun) -> Half:
    """Return the second half in the order of the requests' ends."""
    records = run.records
    assert records.completed.all()
    late = np.argsort(records.finished_s)[len(records) // 2 :]
    ends = records.finished_s[late]
    return Half(
        records.first_token_s[late] - records.intended_s[late],
        (len(late) - 1) / float(ends.max() - ends.min()),
        float(records.cached_tokens[late].sum() / records.prompt_tokens[late].sum()),
    )


def main() -> int:
    """Print the table; return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2400, help="requests of each run")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each arm, with seeds from 1 on")
    parser.add_argument("--tiers", action="append", choices=list(TIERS), help="only these arms; repeatable")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    rows = []
    print(
        f"| tiers | policy | mean TTFT, ms | p99 | requests/s, {CONCURRENCY} at a time | prompt tokens not computed |"
    )
    print("|---|---|--:|--:|--:|--:|")
    for tiers in args.tiers or TIERS:
        for policy in POLICIES:
            one = row(tiers, policy, args.requests, range(1, args.seeds + 1))
            rows.append(one)
            print(
                f"| {tiers} | `{policy}` | {one.mean_ms:.1f} | {one.p99_ms:.0f} | {one.requests_s:.0f} "
                f"| {one.cached:.2f} |",
                flush=True,
            )
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps([asdict(one) for one in rows], indent=1))
    alone = {one.policy: one.mean_ms for one in rows if one.tiers == "host"}
    slower = [
        one for one in rows if one.mean_ms > MAX_OF_HOST * alone.get(one.policy, math.inf) and SHARED in one.tiers
    ]
    for one in slower:
        print(f"missed: {one.tiers}, {one.policy}: {one.mean_ms / alone[one.policy]:.2f} of host memory alone")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
