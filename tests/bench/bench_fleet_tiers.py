"""What tiers are worth to a fleet, and what routing still gains with them: 8 pods in virtual time.

    python -m tests.bench.bench_fleet_tiers [--requests 2400] [--seeds 1] [--out out/fleet_tiers.json]

The working set is three times what all pools hold: 192 prefixes of 2,000 tokens, 8 pools of 16,000 tokens (device
h100-8b), one request in a session, 100 to 200 tokens of its own, answers of 32 tokens. `host`: each pod has host memory
for four times its pool, at 50 GB/s. `host + shared`: and a folder that holds the working set, which each pod reads and
writes at 5 or 12 GB/s. Times to the first token at an offered rate; throughput with 32 requests at a time. Of each run
the second half counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from loadgen.load.arrivals import ArrivalKind, ArrivalSpec
from loadgen.simulate.build import emulated_pods
from loadgen.simulate.fleet import FleetSpec
from loadgen.simulate.pod_tiers import TierSpec
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
RATE, CONCURRENCY = 100.0, 32


@dataclass(frozen=True)
class Row:
    """One arm: milliseconds to the first token, requests/s, and the part of prompt tokens that was not computed."""

    tiers: str
    policy: str
    mean_ms: float
    p99_ms: float
    requests_s: float
    cached: float


def scenario(tiers: TierSpec | None, arrivals: ArrivalSpec, requests: int, seed: int) -> Scenario:
    """The fleet and its traffic."""
    pods = tuple(replace(pod, tiers=tiers) for pod in emulated_pods(PODS, kv_tokens=POOL_TOKENS))
    shared = FOLDER_TOKENS if tiers is not None and tiers.shared_gb_s else 0
    chat = Chat("prefixes", seed, PREFIXES, 0.6, PREFIX_TOKENS, PREFIX_TOKENS, 100, 200, 1, 1, output_tokens=32)
    return Scenario(FleetSpec(pods, shared_tokens=shared), chat, arrivals, requests, seed)


def row(tiers: str, policy: str, requests: int, seeds: Sequence[int]) -> Row:
    """Play it, at the rate and at the concurrency."""
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
    """The offered rate."""
    return ArrivalSpec(ArrivalKind.POISSON, RATE)


@dataclass(frozen=True)
class Half:
    """The second half of a run's requests."""

    ttft: np.ndarray[tuple[int], np.dtype[np.float64]]
    requests_s: float
    cached: float


def late_half(run: SimulatedRun) -> Half:
    """By the order of their ends."""
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
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2400, help="requests of each run")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each arm, with seeds from 1 on")
    parser.add_argument("--tiers", action="append", choices=list(TIERS), help="only these arms; may be given again")
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
