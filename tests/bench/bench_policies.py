"""Microseconds per routing decision, views of the pods included: `python -m tests.bench.bench_policies`."""

from __future__ import annotations

import random
import statistics
import time

from engine.contract.keys import PrefixKey
from engine.contract.load import LoadReport, StepCost
from router.registry.index import Match, PrefixIndex
from router.routing.pod_state import PodState
from router.routing.policies import POLICY_NAMES, make_policy
from router.routing.types import PodId, PodView, Policy, RequestInfo

COST = StepCost(base_s=6e-3, token_s=22e-6, attention_s=1e-9, context_s=7e-8, sequence_s=2e-5)
STRIDES = 32
STRIDE_TOKENS = 64


def loaded_fleet(pods: int, rng: random.Random) -> dict[PodId, PodState]:
    """Pods with a few requests each and a fresh report."""
    fleet = {}
    for i in range(pods):
        state = fleet[PodId(f"pod-{i:02}")] = PodState()
        state.report(LoadReport(running=3, blocks_free=500, blocks_total=1000, cost=COST), now_s=0.0)
        for j in range(6):
            state.sent(str(j), prompt_tokens=2000, uncached_tokens=rng.randrange(2000), output_tokens=100, now_s=0.0)
        state.first_token("0", now_s=0.1)
    return fleet


def prompts(rng: random.Random, count: int = 200) -> list[tuple[PrefixKey, ...]]:
    """Prompts of 32 strides, of which 24 are one of 8 system prompts."""
    systems = [tuple(PrefixKey(rng.getrandbits(64)) for _ in range(24)) for _ in range(8)]
    return [
        rng.choice(systems) + tuple(PrefixKey(rng.getrandbits(64)) for _ in range(STRIDES - 24)) for _ in range(count)
    ]


def views(index: PrefixIndex, fleet: dict[PodId, PodState], keys: tuple[PrefixKey, ...], now_s: float) -> list[PodView]:
    """What the gateway builds for each decision."""
    matches, none = index.match(keys, now_s), Match(0)
    return [
        state.view(pod_id, now_s=now_s, matched_tokens=matches.get(pod_id, none).strides * STRIDE_TOKENS)
        for pod_id, state in fleet.items()
    ]


def decide_us(policy: Policy | None, pods: int, rounds: int = 600) -> float:
    """Median microseconds of match, views and choice; without a policy, of match and views."""
    rng = random.Random(1)
    fleet, index, requests = loaded_fleet(pods, rng), PrefixIndex(), prompts(rng)
    for keys in requests:
        index.apply(rng.choice(list(fleet)), (), (keys, (), ()))
    times = []
    for i in range(rounds):
        keys, now_s = requests[i % len(requests)], 0.1 + i * 1e-3
        start = time.perf_counter()
        seen = views(index, fleet, keys, now_s)
        if policy is not None:
            policy.choose(RequestInfo(keys, STRIDES * STRIDE_TOKENS, now_s), seen)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def main() -> None:
    """Measure and print."""
    print(f"{'us per decision':20} {'8 pods':>8} {'64 pods':>8}")
    print(f"{'match and views':20} {decide_us(None, 8):8.0f} {decide_us(None, 64):8.0f}")
    for name in POLICY_NAMES:
        print(f"{name:20} {decide_us(make_policy(name), 8):8.0f} {decide_us(make_policy(name), 64):8.0f}")


if __name__ == "__main__":
    main()
