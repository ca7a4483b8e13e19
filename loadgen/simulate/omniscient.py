"""The yardstick for other routers: `predicted_ttft`'s decision with each pod's exact cache, queue and cost at that
moment."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.backend.profiles import SimProfile
from engine.cache.prefix_cache import PrefixCache
from engine.cache.sequence import CachedSequence
from engine.contract.fetch_costs import NO_FETCH_COSTS, FetchCosts
from engine.contract.load import StepCost
from loadgen.simulate.pods.pod import Report, SimPod
from loadgen.simulate.pods.routing import Offered, Scrape
from router.routing.policies import PolicyOptions, make_policy
from router.views.latency import further_steps, prefill_s
from router.views.pod_row import PodRow
from router.views.table import PodTable
from router.views.types import PodId, RequestInfo


@dataclass(slots=True, eq=False)
class _Waiting:
    sequence: CachedSequence
    uncached_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class ExactPod:
    """A pod as it is: a `TablePod`."""

    cost: StepCost
    matched_tokens: int
    in_flight: int
    uncached_tokens: int
    """Prompt tokens still to be prefilled."""
    decoding: int
    context_tokens: int
    free_at_s: float

    @property
    def fetch_costs(self) -> FetchCosts:
        """See `TablePod`."""
        return NO_FETCH_COSTS

    def row(self, now_s: float) -> PodRow[float]:
        """See `TablePod`."""
        return PodRow(
            free_at_s=self.free_at_s,
            due_s=math.inf,
            late_step_s=0.0,
            others_until_s=-math.inf,
            others_trust=0.0,
            others_span_s=1.0,
            others_uncached=0.0,
            own_uncached=self.uncached_tokens,
            in_flight=self.in_flight,
            is_busy=self.in_flight > 0,
            has_waiting=self.in_flight > self.decoding,
            decoding=self.decoding,
            context_tokens=self.context_tokens,
            stepped_s=-math.inf,
            token_s=self.cost.token_s,
            overhead_s=0.0,
            weight=1.0,
            shared_latency_s=0.0,
            shared_token_s=0.0,
            is_prior=False,
            valid_until_s=math.inf,
        )

    def watch(self, changed: set[Any]) -> None:
        """See `TablePod`: it never changes."""

    def unwatch(self, changed: set[Any]) -> None:
        """See `TablePod`."""


class Omniscient:
    """A `Router` that sees the pods' state. It also knows what the requests that wait at a pod will add to the
    cache."""

    name = "omniscient"
    scrape_s = 0.0
    takes_reports = False

    def __init__(self, pods: Callable[[], Mapping[str, SimPod]], options: PolicyOptions | None = None) -> None:
        self._pods = pods
        self._policy = make_policy("predicted_ttft", options)
        self._waiting: dict[str, dict[int, _Waiting]] = {}
        self._coming: dict[str, Counter[bytes]] = {}
        """Pod -> digests of the prompt blocks of its requests that have no first token yet."""

    def pods_changed(self, pods: Sequence[str], now_s: float) -> None:
        """See `Router`; not needed, because this router sees the pods."""

    def choose(self, request: Offered, excluded: Sequence[str], now_s: float) -> str | None:
        """See `Router`."""
        pods = [pod for name, pod in sorted(self._pods().items()) if name not in excluded]
        if not pods:
            return None
        sequence = _sequence(request, pods[0].spec.block_size)
        exact = [self._exact(pod, sequence, len(request.tokens), now_s) for pod in pods]
        named = [(PodId(pod.spec.name), known) for pod, known in zip(pods, exact, strict=True)]
        seen = PodTable(named, is_kept=False).at(now_s)
        for row, known in enumerate(exact):
            seen.hold(np.array([row]), known.matched_tokens)
        info = RequestInfo(request.keys, len(request.tokens), now_s, request.output_tokens)
        chosen = self._policy.choose(info, seen).pod
        name = pods[chosen].spec.name
        uncached = max(1, len(request.tokens) - exact[chosen].matched_tokens)
        self._waiting.setdefault(name, {})[request.number] = _Waiting(sequence, uncached)
        self._coming.setdefault(name, Counter()).update(sequence.digests)
        return name

    def first_token(self, request: Offered, pod: str, cached_tokens: int, now_s: float) -> None:
        """See `Router`."""
        self._settle(request.number, pod)

    def ended(self, request: Offered, pod: str, now_s: float, *, completed: bool) -> None:
        """See `Router`."""
        self._settle(request.number, pod)

    def reported(self, pod: str, report: Report, now_s: float) -> None:
        """See `Router`; not needed."""

    def scraped(self, pod: str, scrape: Scrape, now_s: float) -> None:
        """See `Router`; not needed."""

    def _settle(self, number: int, pod: str) -> None:
        waiting = self._waiting.get(pod, {}).pop(number, None)
        if waiting is not None:
            coming = self._coming[pod]
            coming.subtract(waiting.sequence.digests)
            for digest in waiting.sequence.digests:
                if not coming[digest]:
                    del coming[digest]

    def _exact(self, pod: SimPod, sequence: CachedSequence, prompt_tokens: int, now_s: float) -> ExactPod:
        coming = self._coming.get(pod.spec.name, Counter())
        limit = (prompt_tokens - 1) // pod.spec.block_size
        sequence.hits = 0
        hits = pod.cache.count_hits(sequence, prompt_tokens) // pod.spec.block_size
        while hits < limit and sequence.digests[hits] in coming:
            hits += 1
        load = pod.scheduler.load()
        cost = exact_cost(pod.spec.profile, pod.speed)
        started = pod.scheduler.prefills()
        waiting = list(self._waiting.get(pod.spec.name, {}).values())
        waiting = waiting[len(started) :]  # the oldest have begun
        work = [*started, *((w.uncached_tokens, len(w.sequence.digests) * pod.spec.block_size) for w in waiting)]
        running = pod.in_step()  # done when the step ends
        tokens = sum(left for left, _ in work) - sum(count for count, _ in running)
        busy_s = sum(prefill_s(cost, left, known) for left, known in work)
        busy_s -= sum(prefill_s(cost, count, end) for count, end in running)
        # The request shares a step with the waiting requests, as far as the step's tokens allow. The policy adds the
        # time of the request's own steps.
        uncached = prompt_tokens - hits * pod.spec.block_size
        steps = further_steps(tokens + uncached, pod.spec.max_step_tokens) - further_steps(uncached)
        step_s = cost.base_s + cost.sequence_s * load.decoding + cost.context_s * load.context_tokens
        return ExactPod(
            cost,
            hits * pod.spec.block_size,
            load.running + len(waiting),
            tokens,
            load.decoding,
            load.context_tokens,
            pod.step_end_s() + busy_s + steps * step_s if load.running or waiting else now_s,
        )


def exact_cost(profile: SimProfile, speed: float) -> StepCost:
    """Return the profile's constants in seconds. The base is the profile's floor w0, because most steps only decode."""
    scale = 1e-3 / speed
    return StepCost(
        profile.w0_ms * scale,
        profile.c1_ms * scale,
        profile.c2_ms * scale,
        profile.c3_ms * scale,
        profile.c4_ms * scale,
    )


def _sequence(request: Offered, block_size: int) -> CachedSequence:
    return PrefixCache(1, block_size).open(request.tokens)
