"""A fleet in virtual time: emulated pods with a prefill queue and an LRU prefix cache, the real index and policies.

A pod prefills in steps, first come first served, and computes a prefix that waiting requests share once. Its decoding
sequences lengthen each step. `EVENT_DELAY_S` later, the gateway hears what the pod stores, evicts and has queued.
The constants are those of an 8B model on an H100.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from engine.contract.keys import PrefixKey
from engine.contract.load import LoadReport, StepCost
from router.registry.index import PrefixIndex
from router.views.latency import decode_s, prefill_s
from router.views.pod_state import PodState
from router.views.table import CandidatePods, PodTable, Policy
from router.views.types import PodId, RequestInfo

COST = StepCost(base_s=6e-3, token_s=22e-6, attention_s=1.07e-9, context_s=7e-8, sequence_s=2e-5)
STRIDE_TOKENS = 64
STEP_TOKENS = 2048
EVENT_DELAY_S = 0.05
SPECULATION_S = 3.0


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    keys: tuple[PrefixKey, ...]
    output_tokens: int = 100

    @property
    def prompt_tokens(self) -> int:
        return len(self.keys) * STRIDE_TOKENS + 20


@dataclass(frozen=True, slots=True)
class Outcome:
    hit_rate: float
    mean_ttft_s: float
    p99_ttft_s: float
    imbalance: float
    """The longest time that a pod spent on prefill, divided by the pods' mean."""


@dataclass(slots=True)
class Waiting:
    request_id: str
    arrival: Arrival
    left: int | None = None
    """Tokens still to be prefilled; None until the first step, which looks up the cache."""
    cached: int = 0


@dataclass(slots=True)
class SimPod:
    pod_id: PodId
    capacity: int
    """Keys that the pod can hold."""
    cache: dict[PrefixKey, None] = field(default_factory=dict)
    """Keys by last use, the oldest first. Of one prompt's keys, the deepest is taken as the oldest."""
    queue: deque[Waiting] = field(default_factory=deque)
    stepping: bool = False
    busy_s: float = 0.0
    decoding: dict[str, int] = field(default_factory=dict)

    def held(self, keys: Sequence[PrefixKey], ahead: Collection[PrefixKey] = ()) -> int:
        """Return how many leading keys are cached, or will be when earlier requests have prefilled the keys `ahead`."""
        missing = (i for i, key in enumerate(keys) if key not in self.cache and key not in ahead)
        return next(missing, len(keys))

    def store(self, keys: Sequence[PrefixKey]) -> tuple[tuple[PrefixKey, ...], tuple[PrefixKey, ...]]:
        """Store a prompt's keys. Return the keys removed for them, deepest first, and the keys that are new."""
        stored = tuple(key for key in keys if key not in self.cache)
        for key in reversed(keys):
            self.cache.pop(key, None)
            self.cache[key] = None
        removed = tuple(itertools.islice(self.cache, max(0, len(self.cache) - self.capacity)))
        for key in removed:
            del self.cache[key]
        return removed, tuple(key for key in stored if key in self.cache)

    def load(self) -> LoadReport:
        left = [w.left or w.arrival.prompt_tokens - self.held(w.arrival.keys) * STRIDE_TOKENS for w in self.queue]
        return LoadReport(
            running=len(self.decoding),
            waiting=len(self.queue),
            uncached_tokens=sum(left),
            decoding=len(self.decoding),
            context_tokens=sum(self.decoding.values()),
            cost=COST,
        )


class Fleet:
    """`policy` in front of `pods` pods. `reports`: the pods publish their keys and their load, as our engine does."""

    def __init__(
        self, policy: Policy, *, pods: int = 8, capacity: int = 1500, speculation: bool = True, reports: bool = True
    ) -> None:
        self.policy = policy
        self.pods = [SimPod(PodId(f"pod-{i}"), capacity) for i in range(pods)]
        self.states = [PodState() for _ in range(pods)]
        self.table = PodTable([(pod.pod_id, state) for pod, state in zip(self.pods, self.states, strict=True)])
        for state in self.states:
            if reports:
                state.report(LoadReport(cost=COST), now_s=0.0)
        self.index = PrefixIndex()
        self.speculation_s = (SPECULATION_S if reports else 600.0) if speculation else 0.0
        self.reports = reports
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._ttfts: list[float] = []
        self._cached = self._prompt = 0

    def run(self, arrivals: Sequence[Arrival]) -> Outcome:
        for i, arrival in enumerate(arrivals):
            self._at(arrival.at_s, partial(self._arrive, str(i), arrival))
        while self._events:
            self.now_s, _, act = heapq.heappop(self._events)
            act()
        busy = [pod.busy_s for pod in self.pods]
        assert len(self._ttfts) == len(arrivals)
        return Outcome(
            self._cached / self._prompt,
            statistics.fmean(self._ttfts),
            sorted(self._ttfts)[int(0.99 * len(self._ttfts))],
            max(busy) / statistics.fmean(busy),
        )

    def _at(self, when_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), act))

    def _seen(self, arrival: Arrival) -> CandidatePods:
        seen = self.table.at(self.now_s)
        for pods, strides in self.index.match_sets(arrival.keys, self.now_s)[0]:
            seen.hold(self.table.rows(pods), strides * STRIDE_TOKENS)
        return seen

    def _arrive(self, request_id: str, arrival: Arrival) -> None:
        seen = self._seen(arrival)
        request = RequestInfo(arrival.keys, arrival.prompt_tokens, self.now_s, arrival.output_tokens)
        chosen = self.policy.choose(request, seen).pod
        pod = self.pods[chosen]
        self.states[chosen].sent(
            request_id,
            prompt_tokens=arrival.prompt_tokens,
            uncached_tokens=arrival.prompt_tokens - seen.matched_by(chosen),
            output_tokens=arrival.output_tokens,
            now_s=self.now_s,
        )
        if self.speculation_s:
            self.index.speculate(pod.pod_id, arrival.keys, self.now_s, self.speculation_s)
        pod.queue.append(Waiting(request_id, arrival))
        if not pod.stepping:
            pod.stepping = True
            step_s = decode_s(COST, len(pod.decoding), sum(pod.decoding.values()))
            until_next_s = step_s - self.now_s % step_s if pod.decoding else 0.0
            self._at(self.now_s + until_next_s, lambda: self._step(chosen))

    def _step(self, chosen: int) -> None:
        """Begin a step with prefill of up to `STEP_TOKENS` tokens, if any is waiting."""
        pod = self.pods[chosen]
        pod.stepping = bool(pod.queue)
        if not pod.queue:
            return
        budget, service_s, done = STEP_TOKENS, 0.0, 0
        ahead: set[PrefixKey] = set()
        for waiting in pod.queue:
            if waiting.left is None:
                waiting.cached = pod.held(waiting.arrival.keys, ahead) * STRIDE_TOKENS
                waiting.left = waiting.arrival.prompt_tokens - waiting.cached
                self._cached += waiting.cached
                self._prompt += waiting.arrival.prompt_tokens
            ahead.update(waiting.arrival.keys)
            chunk = min(budget, waiting.left)
            service_s += prefill_s(COST, chunk, waiting.arrival.prompt_tokens - waiting.left + chunk)
            waiting.left -= chunk
            budget -= chunk
            done += waiting.left == 0
            if not budget:
                break
        service_s += decode_s(COST, len(pod.decoding), sum(pod.decoding.values()))
        pod.busy_s += service_s
        self._at(self.now_s + service_s, lambda: self._step_done(chosen, done))

    def _step_done(self, chosen: int, done: int) -> None:
        pod = self.pods[chosen]
        removed: list[PrefixKey] = []
        stored: list[PrefixKey] = []
        for _ in range(done):
            waiting = pod.queue.popleft()
            self._first_token(chosen, waiting)
            gone, new = pod.store(waiting.arrival.keys)
            removed += gone
            stored = [key for key in stored if key not in gone] + list(new)
        self._step(chosen)
        if self.reports:
            load = pod.load()
            self._at(self.now_s + EVENT_DELAY_S, lambda: self._report(chosen, tuple(removed), tuple(stored), load))

    def _first_token(self, chosen: int, waiting: Waiting) -> None:
        pod, arrival = self.pods[chosen], waiting.arrival
        self._ttfts.append(self.now_s - arrival.at_s)
        pod.decoding[waiting.request_id] = arrival.prompt_tokens
        self.states[chosen].first_token(waiting.request_id, now_s=self.now_s, cached_tokens=waiting.cached)
        step_s = decode_s(COST, len(pod.decoding), sum(pod.decoding.values()))
        self._at(self.now_s + arrival.output_tokens * step_s, lambda: self._finish(chosen, waiting.request_id))

    def _report(
        self, chosen: int, removed: tuple[PrefixKey, ...], stored: tuple[PrefixKey, ...], load: LoadReport
    ) -> None:
        self.index.apply(self.pods[chosen].pod_id, removed, (stored, (), ()))
        self.states[chosen].report(load, now_s=self.now_s)

    def _finish(self, chosen: int, request_id: str) -> None:
        del self.pods[chosen].decoding[request_id]
        self.states[chosen].finished(request_id, now_s=self.now_s)
