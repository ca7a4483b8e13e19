"""Microseconds of a decision in the gateway by fleet size: `python -m tests.bench.gateway.bench_decision`.

A decision matches the keys, updates the table, chooses a pod and enters the keys. The time excludes counting the
request on its pod, its first token and its end, but includes the updates that they cause. The median of all decisions
is printed, and the tenth percentile, which other programs on the machine disturb less. With `--foreign`, the pods
publish nothing, have reported a small capacity and are full, so that evictions count.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Sequence

from engine.contract.events import Keys
from engine.contract.keys import PrefixKey
from engine.contract.load import LoadReport
from engine.contract.requests import Endpoint
from router.choosing.chooser import Chooser, Knowledge
from router.choosing.registry_view import NoRegistry
from router.fleet.facts import EngineFacts
from router.fleet.pod import Pod
from router.reading.inbound import Inbound
from router.reading.model_ratios import Estimates
from router.registry.cache_estimate import Taken
from router.registry.index import PrefixIndex
from router.routing.policies import POLICY_NAMES
from router.settings.constants import Constants
from router.telemetry.metrics import Metrics
from router.views.types import PodId
from tests.bench.gateway.bench_policies import (
    COST,
    STRIDE_TOKENS,
    STRIDES,
    Serving,
    loaded_fleet,
    make_policies,
    prompts,
)

SIZES = (8, 64, 256, 1000)
MOST_US = (100, 90, 120, 200)
"""Upper targets in microseconds for a decision of `predicted_ttft`."""
REPORTS_PER_DECISION = 2
"""Load reports between two decisions: for a thousand pods with two per second each, at 1,000 requests/s."""
IN_FLIGHT = 4
"""Requests in flight per pod, on average."""
FOREIGN_PROMPTS = 3
"""Prompts that fit the cache of a pod that publishes nothing."""


class World:
    """A fleet, and a chooser that decides for it."""

    def __init__(self, pods: int, policy: str, shared: str, *, foreign: bool = False) -> None:
        rng = random.Random(1)
        fleet = dict(sorted(loaded_fleet(pods, rng).items()))
        self.now_s = 0.1
        self._policy = policy
        self._serving = Serving(fleet)
        self._pods: Sequence[Pod] = self._serving.pods("m")
        self._rng = rng
        index = self._index = PrefixIndex()
        self._requests = prompts(rng)
        capacity = FOREIGN_PROMPTS * STRIDE_TOKENS * STRIDES

        def hold(pod_id: PodId, keys: Keys) -> None:
            if foreign:
                taken = Taken(STRIDE_TOKENS * len(keys), float(STRIDE_TOKENS), capacity, STRIDE_TOKENS)
                index.speculate(pod_id, keys, 0.0, math.inf, taken)
            else:
                index.apply(pod_id, (), (keys, (), ()))

        for keys in self._requests:
            hold(rng.choice(list(fleet)), keys)
        if foreign:
            for pod in self._pods:
                pod.facts = EngineFacts("vllm", None, capacity, STRIDE_TOKENS)
                for keys in rng.sample(self._requests, FOREIGN_PROMPTS):
                    hold(pod.pod_id, keys)
        if shared == "all":
            self._requests = [self._requests[0][:24] + keys[24:] for keys in self._requests]
            for pod_id in fleet:
                hold(pod_id, self._requests[0][:24])
        elif shared == "none":
            self._requests = [tuple(PrefixKey(rng.getrandbits(64)) for _ in range(STRIDES)) for _ in range(400)]
        self._open: deque[tuple[Pod, str]] = deque()
        self._chooser = Chooser(
            Knowledge(self._serving, index, NoRegistry(), Estimates()),
            make_policies,
            Metrics(),
            Constants(stride_bytes=4 * STRIDE_TOKENS),
            clock=lambda: self.now_s,
        )

    def decide(self, number: int) -> tuple[str, float]:
        """Return the pod, and the microseconds of the choice."""
        self.now_s += 1e-3
        for _ in range(REPORTS_PER_DECISION):
            load = LoadReport(running=3, decoding=2, blocks_free=500, blocks_total=1000, cost=COST)
            self._rng.choice(self._pods).state.report(load, now_s=self.now_s)
        keys = self._requests[number % len(self._requests)]
        size, tokens = 4 * STRIDE_TOKENS * STRIDES, STRIDE_TOKENS * STRIDES
        inbound = Inbound(
            Endpoint.COMPLETIONS,
            "m",
            True,
            self._policy,
            keys,
            size,
            tokens,
            float(STRIDE_TOKENS),
            128,
            teaches_tokens=True,
            body=b"",
        )
        began_s = time.perf_counter()
        choice = self._chooser.choose(inbound)
        took_us = 1e6 * (time.perf_counter() - began_s)
        state = choice.pod.state
        uncached = max(0, tokens - choice.cached_tokens)
        state.sent(str(number), prompt_tokens=tokens, uncached_tokens=uncached, output_tokens=128, now_s=self.now_s)
        self._open.append((choice.pod, str(number)))
        if len(self._open) > IN_FLIGHT * len(self._pods) // 2:
            pod, request = self._open[len(self._open) // 2]
            pod.state.first_token(request, now_s=self.now_s)
            pod, request = self._open.popleft()
            pod.state.finished(request, now_s=self.now_s)
        return choice.pod.pod_id, took_us

    @property
    def regret(self) -> float:
        """See `PrefixIndex.regret`."""
        return self._index.regret


def decisions_us(pods: int, policy: str, shared: str, rounds: int, *, foreign: bool = False) -> tuple[float, float]:
    """Return the median and the tenth percentile of a decision's microseconds."""
    world = World(pods, policy, shared, foreign=foreign)
    taken_us = sorted([world.decide(number)[1] for number in range(rounds)][rounds // 5 :])
    if foreign and shared != "none" and not world.regret:
        raise AssertionError("nothing that was evicted was asked for again: evictions cost nothing here")
    return statistics.median(taken_us), taken_us[len(taken_us) // 10]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", nargs="*", default=["predicted_ttft"], choices=POLICY_NAMES)
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--foreign", action="store_true")
    arguments = parser.parse_args()
    foreign = arguments.foreign
    print(f"{'policy':16} {'prompt held by':15} " + " ".join(f"{size:>13} pods" for size in SIZES))
    for policy in arguments.policies:
        for shared in ("some", "all", "none"):
            cells = []
            for size in SIZES:
                median_us, least_us = decisions_us(size, policy, shared, arguments.rounds, foreign=foreign)
                cells.append(f"{median_us:5.0f} us ({least_us:.0f})")
            print(f"{policy:16} {shared:15} " + " ".join(f"{cell:>18}" for cell in cells), flush=True)
    print(
        "predicted_ttft: meant to take at most "
        + ", ".join(f"{us} us at {n}" for us, n in zip(MOST_US, SIZES, strict=True))
    )


if __name__ == "__main__":
    main()
