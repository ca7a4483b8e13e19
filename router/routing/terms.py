"""The terms of `predicted_ttft`'s score: one function each, in seconds, for all pods of a table at once.

A term returns an array with a number for each pod, or one number if all pods have the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np

from router.routing.fetching import wide_fetch_or_compute_s
from router.routing.weights import Weights
from router.views import latency
from router.views.latency import STEP_TOKENS
from router.views.pod_partition import spared_unseen_s
from router.views.table import Floats, WidePods
from router.views.types import RequestInfo

Seconds = float | Floats


@dataclass(slots=True)
class Usual:
    """Moving means over requests, which a policy learns."""

    prefill_s: float = math.inf
    """Seconds of prefill of a usual prompt if nothing of it were cached; infinite before the first request."""
    least_prefill_s: float = math.inf
    """Seconds of prefill of the part of a usual prompt that no pod holds."""


@dataclass
class Costing:
    """A request on each pod: what several terms need."""

    request: RequestInfo
    pods: WidePods
    usual: Usual
    owed_s: float
    """The debt to the request's longest match: see `debt.py`."""
    weights: Weights

    def __post_init__(self) -> None:
        pods, prompt = self.pods, self.request.prompt_tokens
        self.speeds = speeds = pods.table.speeds(self.weights.same_speed)
        self.cost: Any = speeds if speeds.unlike else speeds.median
        """Has the fields of a `StepCost`: the formulas take arrays in place of numbers."""
        self.uncached: Any = prompt if pods.matched is None else np.maximum(prompt - pods.matched, 1.0)
        """Prompt tokens that each pod would have to compute."""
        self.least_uncached = max(1, prompt - pods.longest)
        """Prompt tokens that no pod holds."""
        self.prefill_s: Any = latency.prefill_s(self.cost, self.uncached, prompt)
        columns = pods.columns
        self.step_s: Floats = latency.decode_s(
            self.cost, cast(Any, columns.decoding), cast(Any, columns.context_tokens)
        )
        """A step of each pod without its prefill."""
        self.queued_s: Floats = np.maximum(pods.free_at_s(self.request.now_s) - self.request.now_s, 0.0)
        """The prefill queued on each pod. If a pod counts as fast as its peers, so does its queue, which was computed
        with the pod's own speed."""
        self.queued_s *= speeds.own_share

    @cached_property
    def stalling_s(self) -> Any:
        """The part of the prefill that requests which decode now still see: a prefill much longer than usual outlasts
        them."""
        return np.minimum(self.prefill_s, self.usual.prefill_s)

    @cached_property
    def least_prefill_s(self) -> Any:
        """The prefill on a pod of this speed with the longest match."""
        return latency.prefill_s(self.cost, self.least_uncached, self.request.prompt_tokens)

    @cached_property
    def duplicate_s(self) -> Seconds:
        """What a pod with the longest match would save: of prefill, and of the delay to decoding requests."""
        if self.pods.matched is None:
            return 0.0
        least_s, stall = self.least_prefill_s, self.weights.stall_weight * self.pods.columns.decoding
        duplicate_s = self.prefill_s - least_s + stall * self.stalling_s
        duplicate_s = duplicate_s - stall * np.minimum(least_s, self.usual.prefill_s)
        return cast(Seconds, duplicate_s * (self.uncached > self.least_uncached))

    @cached_property
    def ttft_s(self) -> Floats:
        """The predicted time to first token."""
        return cast(Floats, _sum(TTFT_TERMS, self))

    @cached_property
    def scores(self) -> Floats:
        """The predicted time to first token, and the delay to other requests."""
        return cast(Floats, self.ttft_s + _sum(DELAY_TERMS, self) - copy_credit_s(self))


def queue_s(at: Costing) -> Seconds:
    """Seconds until the pod begins with the request: its queued prefill ends, or its running step (`step_left_s`)."""
    columns, step_s = at.pods.columns, at.step_s
    left_s = np.maximum(step_s / 2, step_s - (at.request.now_s - columns.stepped_s))
    left_s *= columns.in_flight > 0
    return cast(Floats, np.maximum(at.queued_s, left_s))


def prefill_s(at: Costing) -> Seconds:
    """Seconds of the request's own prefill: `latency.prefill_s`."""
    return cast(Seconds, at.prefill_s)


def decode_s(at: Costing) -> Seconds:
    """Seconds of decoding in the steps of the prefill: `latency.decode_s` times 1 + `further_steps`."""
    if at.request.prompt_tokens <= STEP_TOKENS:
        return at.step_s
    return cast(Floats, at.step_s * (1 + np.maximum(at.uncached / STEP_TOKENS - 1, 0.0)))


def fetch_s(at: Costing) -> Seconds:
    """Seconds to fetch KV from tiers below the pool: `fetch_or_compute_s`."""
    if at.pods.tiers is None:
        return 0.0
    return wide_fetch_or_compute_s(at.pods.tiers, at.cost, at.uncached, at.request.prompt_tokens, at.weights)


def overhead_s(at: Costing) -> Seconds:
    """Fixed seconds of a request; pods in `Speeds.apart` have the median pod's."""
    columns, speeds = at.pods.columns, at.speeds
    if not speeds.apart:
        return columns.overhead_s
    overheads_s = columns.overhead_s.copy()
    overheads_s[list(speeds.apart)] = overheads_s[speeds.median_row]
    return overheads_s


def externality_s(at: Costing) -> Seconds:
    """Seconds by which the prefill delays requests that come later: its length, but at most the mean queue."""
    return cast(Seconds, np.minimum(at.prefill_s, math.fsum(at.queued_s.tolist()) / len(at.queued_s)))


def pressure_s(at: Costing) -> Seconds:
    """Seconds of work done twice by a pod that has no free KV blocks and preempts."""
    return cast(
        Floats,
        at.weights.pressure_weight * at.cost.token_s * at.request.prompt_tokens * at.pods.columns.fullness,
    )


def shared_step_s(at: Costing) -> Seconds:
    """Seconds that the prefill adds to the step that it shares with a waiting request."""
    columns = at.pods.columns
    shared_s = np.minimum(at.stalling_s, STEP_TOKENS * at.cost.token_s)
    return cast(Floats, shared_s * (columns.in_flight > columns.decoding))


def stall_s(at: Costing) -> Seconds:
    """Seconds by which the prefill delays decoding requests, weighted."""
    return cast(Seconds, at.weights.stall_weight * at.pods.columns.decoding * at.stalling_s)


def evict_s(at: Costing) -> Seconds:
    """Seconds to compute again what the pod evicts for the request, times the probability that it is asked for."""
    request, room = at.request, at.pods.room
    if not request.regret or room is None:
        return 0.0
    evicted = np.maximum(at.uncached + request.output_tokens - room, 0.0)
    return cast(Floats, request.regret * at.cost.token_s * evicted)


def unseen_s(at: Costing) -> Seconds:
    """Seconds of prefill that other gateways may have just sent to the pod."""
    partition, pods = at.request.parting, at.pods
    if partition is None:
        return 0.0
    others_s: Floats = np.full(len(pods.table), partition.unseen_s)
    if pods.matched is not None:
        token_s, spared = float(np.min(at.cost.token_s)), pods.longest - float(pods.matched.min())
        if (least_s := spared_unseen_s(partition, token_s, spared)) < partition.unseen_s:
            others_s[pods.matched == pods.longest] *= least_s / partition.unseen_s
    own = partition.own_rows(len(pods.table))
    others_s[own.start : own.stop] = 0.0
    return others_s


def switch_s(at: Costing) -> Seconds:
    """Seconds by which a pod must be better than the one with the longest match: a duplicate also evicts something."""
    return at.weights.switch_margin * at.duplicate_s


def copy_credit_s(at: Costing) -> Seconds:
    """Seconds taken off the score of a pod that would hold a further copy of the prefix: the debt to the prefix, but at
    most what the copy costs the request.

    A request with more of its own to compute than usual gets only a part of it. Such a request waits for a pod that
    holds the prefix, and a later one makes the copy. Otherwise the slowest first tokens would get slower still.
    """
    if not at.owed_s or at.pods.matched is None:
        return 0.0
    credit_s = np.minimum(at.owed_s, at.duplicate_s + (switch_s(at) if switch_s in DELAY_TERMS else 0.0))
    if at.usual.least_prefill_s < math.inf:
        credit_s = credit_s * (1 - np.maximum(at.least_prefill_s - at.usual.least_prefill_s, 0.0) / at.prefill_s)
    return cast(Seconds, credit_s)


Term = Callable[[Costing], Seconds]
TTFT_TERMS: tuple[Term, ...] = (queue_s, prefill_s, decode_s, fetch_s, overhead_s)
"""The terms of the predicted time to first token."""
DELAY_TERMS: tuple[Term, ...] = (externality_s, pressure_s, shared_step_s, stall_s, evict_s, unseen_s, switch_s)
"""The terms of the delay to other requests."""


def _sum(terms: tuple[Term, ...], at: Costing) -> Seconds:
    total: Seconds = 0.0
    for term in terms:
        total = total + term(at)
    return total
