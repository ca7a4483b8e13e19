"""Microseconds per routing decision, including the match of the keys, and the extra time of shadow policies:
`python -m tests.bench.gateway.bench_policies`."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence

from engine.contract.keys import PrefixKey
from engine.contract.load import LoadReport, StepCost
from engine.contract.requests import Endpoint
from router.choosing.chooser import Chooser, Knowledge
from router.choosing.registry_view import NoRegistry
from router.choosing.shadow import Shadows
from router.fleet.pod import Pod
from router.fleet.probe import PodIdentity
from router.reading.inbound import Inbound
from router.reading.model_ratios import Estimates
from router.registry.index import PrefixIndex
from router.routing.policies import POLICY_NAMES, make_policy
from router.settings.constants import Constants
from router.telemetry.metrics import Metrics
from router.views.pod_state import PodState
from router.views.table import PodTable, Policy
from router.views.types import PodId, RequestInfo

COST = StepCost(base_s=6e-3, token_s=22e-6, attention_s=1e-9, context_s=7e-8, sequence_s=2e-5)
STRIDES = 32
STRIDE_TOKENS = 64


def loaded_fleet(pods: int, rng: random.Random) -> dict[PodId, PodState]:
    """Return pods with a few requests each and a fresh report."""
    fleet = {}
    for i in range(pods):
        state = fleet[PodId(f"pod-{i:02}")] = PodState()
        state.report(LoadReport(running=3, blocks_free=500, blocks_total=1000, cost=COST), now_s=0.0)
        for j in range(6):
            state.sent(str(j), prompt_tokens=2000, uncached_tokens=rng.randrange(2000), output_tokens=100, now_s=0.0)
        state.first_token("0", now_s=0.1)
    return fleet


def prompts(rng: random.Random, count: int = 200) -> list[tuple[PrefixKey, ...]]:
    """Return prompts of 32 strides; 24 of them are one of 8 system prompts."""
    systems = [tuple(PrefixKey(rng.getrandbits(64)) for _ in range(24)) for _ in range(8)]
    return [
        rng.choice(systems) + tuple(PrefixKey(rng.getrandbits(64)) for _ in range(STRIDES - 24)) for _ in range(count)
    ]


def decide_us(name: str | None, pods: int, rounds: int = 600) -> float:
    """Return median microseconds of match and choice over a table; without a policy, of the match."""
    rng = random.Random(1)
    fleet, index, requests = loaded_fleet(pods, rng), PrefixIndex(), prompts(rng)
    for keys in requests:
        index.apply(rng.choice(list(fleet)), (), (keys, (), ()))
    table, policy = PodTable(fleet.items()), None if name is None else make_policy(name)
    times = []
    for i in range(rounds):
        keys, now_s = requests[i % len(requests)], 0.1 + i * 1e-3
        start = time.perf_counter()
        seen = table.at(now_s)
        for pod_ids, strides in index.match_sets(keys, now_s)[0]:
            seen.hold(table.rows(pod_ids), strides * STRIDE_TOKENS)
        if policy is not None:
            policy.choose(RequestInfo(keys, STRIDES * STRIDE_TOKENS, now_s), seen)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


class Serving:
    """A fleet of pods that all serve every model."""

    def __init__(self, fleet: Mapping[PodId, PodState]) -> None:
        self._pods = [Pod("http://pod", PodIdentity(pod_id, 1, ())) for pod_id in fleet]
        for pod in self._pods:
            pod.state = fleet[pod.pod_id]

    def pods(self, model: str) -> Sequence[Pod]:
        """Return all pods."""
        return self._pods


def make_policies() -> Mapping[str, Policy]:
    """Return new instances of every policy."""
    return {name: make_policy(name) for name in POLICY_NAMES}


def shadowed_us(shadow_counts: Sequence[Sequence[str]], pods: int, rounds: int = 600) -> list[float]:
    """Return median microseconds of `Chooser.choose` by `predicted_ttft`, for each of some sets of shadow policies. The
    sets take turns for each request, so that other work on the machine slows all of them."""
    choosers, now_s = [], 0.1
    for shadows in shadow_counts:
        rng, metrics, index = random.Random(1), Metrics(), PrefixIndex()
        fleet, requests = loaded_fleet(pods, rng), prompts(rng)
        for keys in requests:
            index.apply(rng.choice(list(fleet)), (), (keys, (), ()))
        choosers.append(
            Chooser(
                Knowledge(Serving(fleet), index, NoRegistry(), Estimates()),
                make_policies,
                metrics,
                Constants(stride_bytes=4 * STRIDE_TOKENS),
                clock=lambda: now_s,
                shadows=Shadows(shadows, make_policies, metrics) if shadows else None,
            )
        )
    times: list[list[float]] = [[] for _ in choosers]
    for i in range(rounds):
        keys = requests[i % len(requests)]
        now_s = 0.1 + i * 1e-3
        size, tokens = 4 * STRIDE_TOKENS * STRIDES, STRIDE_TOKENS * STRIDES
        inbound = Inbound(
            Endpoint.COMPLETIONS,
            "m",
            True,
            "predicted_ttft",
            keys,
            size,
            tokens,
            float(STRIDE_TOKENS),
            128,
            teaches_tokens=True,
            body=b"",
        )
        for chooser, taken in zip(choosers, times, strict=True):
            start = time.perf_counter()
            chooser.choose(inbound)
            taken.append((time.perf_counter() - start) * 1e6)
    return [statistics.median(taken) for taken in times]


def main() -> None:
    """Measure and print."""
    print(f"{'us per decision':20} {'8 pods':>8} {'64 pods':>8}")
    print(f"{'match':20} {decide_us(None, 8):8.0f} {decide_us(None, 64):8.0f}")
    for name in POLICY_NAMES:
        print(f"{name:20} {decide_us(name, 8):8.0f} {decide_us(name, 64):8.0f}")
    names = ("cache_aware", "affinity_groups", "round_robin")
    shadow_sets = [(), *((name,) for name in names), names]
    print(f"\n{'predicted_ttft in the gateway, shadow policies':46} {'8 pods':>8} {'64 pods':>8}")
    for shadows, few, many in zip(shadow_sets, shadowed_us(shadow_sets, 8), shadowed_us(shadow_sets, 64), strict=True):
        print(f"{', '.join(shadows) or 'none':46} {few:8.0f} {many:8.0f}")


if __name__ == "__main__":
    main()
