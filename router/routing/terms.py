"""The terms of `predicted_ttft`'s score, a function each, in seconds.

A term returns a number for each pod, or one number if all pods have the same. The score of a pod is the sum of its
terms: `TTFT_TERMS` predict the time to first token, `DELAY_TERMS` what the request costs others, and
`REPLICATION_TERMS` what another copy of the prefix is worth. ABLATION.md says what each term gains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from router.routing.fetching import fetch_or_compute_s
from router.views import latency
from router.views.latency import STEP_TOKENS
from router.views.pod_partition import spared_unseen_s
from router.views.table import CandidatePods, Floats, Ints, Seconds
from router.views.types import RequestInfo

SAME_SPEED = 0.5
"""Pods whose learnt speed is within this share of the median pod's count as equally fast. Learnt constants of equal
pods differ by noise. Taken literally, they send every new prefix of an idle fleet to one pod."""
STALL_WEIGHT = 0.05
"""Cost of a second of prefill for each decoding request that waits for it: a reader minds a late token less than a late
answer."""
_FOLLOW = 0.02
"""Weight of a request in the means of `Usual`."""
_NO_ROWS: Ints = np.zeros(0, dtype=np.intp)


class Usual:
    """Moving means over the requests of a policy."""

    __slots__ = ("least_prefill_s", "prefill_s")

    def __init__(self) -> None:
        self.prefill_s = math.inf
        """Seconds of prefill of a usual prompt if nothing of it were cached; infinite before the first request."""
        self.least_prefill_s = math.inf
        """Seconds of prefill of the part of a usual prompt that no pod holds."""

    def saw(self, prefill_s: float, least_prefill_s: float) -> None:
        """Count a request."""
        if self.prefill_s == math.inf:
            self.prefill_s, self.least_prefill_s = prefill_s, least_prefill_s
        self.prefill_s += _FOLLOW * (prefill_s - self.prefill_s)
        self.least_prefill_s += _FOLLOW * (least_prefill_s - self.least_prefill_s)


class Estimate:
    """A request on each pod: numbers that several terms need."""

    __slots__ = (
        "cost",
        "credit_s",
        "duplicate_s",
        "lacking",
        "least_prefill_s",
        "least_uncached",
        "owed_s",
        "pods",
        "prefill_s",
        "queued_s",
        "request",
        "speeds",
        "stall_weights",
        "stalling_s",
        "step_s",
        "uncached",
        "usual",
    )

    def __init__(self, request: RequestInfo, pods: CandidatePods, usual: Usual, owed_s: float = 0.0) -> None:
        """`owed_s`: see `replication.py`."""
        prompt, columns = request.prompt_tokens, pods.columns
        self.request, self.pods, self.usual, self.owed_s = request, pods, usual, owed_s
        self.speeds = speeds = pods.table.speeds(SAME_SPEED)
        cost: Any = speeds if speeds.unlike else speeds.median
        uncached: Any = prompt if pods.matched is None else prompt - pods.matched
        if pods.longest >= prompt:
            uncached = np.maximum(uncached, 1.0)  # of a prompt that is cached whole, the last token is computed
        self.cost = cost
        """Has the fields of a `StepCost`: the formulas take arrays in place of numbers."""
        self.uncached = uncached
        """Prompt tokens that each pod would have to compute."""
        self.least_uncached = max(1, prompt - pods.longest)
        """Prompt tokens that no pod holds."""
        self.prefill_s: Any = latency.prefill_s(cost, uncached, prompt)
        self.least_prefill_s: Any = latency.prefill_s(cost, self.least_uncached, prompt)
        """The prefill on a pod of the same speed with the longest match."""
        self.stall_weights: Floats = STALL_WEIGHT * columns.decoding
        """What a second of prefill costs the requests that decode on each pod."""
        self.stalling_s: Any = lesser(self.prefill_s, usual.prefill_s)
        """The part of the prefill that requests which decode now still see: a prefill much longer than usual outlasts
        them."""
        self.step_s = self._step_s()
        """A step of each pod without its prefill."""
        self.queued_s: Floats = np.maximum(pods.free_at_s(request.now_s) - request.now_s, 0.0)
        """The prefill queued on each pod. If a pod counts as fast as its peers, so does its queue, which was computed
        with the pod's own speed."""
        if speeds.own_share is not None:
            self.queued_s *= speeds.own_share
        self.lacking = _NO_ROWS if pods.matched is None else (uncached > self.least_uncached).nonzero()[0]
        """The rows of the pods that hold less than the longest match."""
        self.duplicate_s = self._duplicate_s() if len(self.lacking) else None
        """What a pod with the longest match would save: of prefill, and of the delay to decoding requests. None if no
        pod would save anything."""
        self.credit_s = None if self.duplicate_s is None or not owed_s else self._credit_s(self.duplicate_s)
        """What of the seconds owed to the prefix counts for a pod that would hold another copy; None: nothing."""

    def ttft_s(self) -> Floats:
        """Return the predicted times to first token."""
        ttft_s = _sum(TTFT_TERMS, self)
        assert not isinstance(ttft_s, float)  # a queue differs from pod to pod
        return ttft_s

    def scores(self, ttft_s: Floats) -> Floats:
        """Return the scores, for the predicted times to first token."""
        return ttft_s + _sum((*DELAY_TERMS, *REPLICATION_TERMS), self)

    def parts(self) -> dict[str, Seconds]:
        """Return every term by name."""
        return {term.__name__: term(self) for term in (*TTFT_TERMS, *DELAY_TERMS, *REPLICATION_TERMS)}

    def _step_s(self) -> Seconds:
        cost, columns = self.cost, self.pods.columns
        if not self.speeds.unlike and not (cost.sequence_s or cost.context_s):
            return self.speeds.median.base_s  # the same for all, as for all engines whose speed is learnt
        decoding: Any = columns.decoding
        context_tokens: Any = columns.context_tokens
        step_s: Any = latency.decode_s(cost, decoding, context_tokens)
        seconds: Floats = step_s
        return seconds

    def _duplicate_s(self) -> Floats:
        delay_s = self.stalling_s - lesser(self.least_prefill_s, self.usual.prefill_s)
        saved_s: Floats = self.prefill_s - self.least_prefill_s + self.stall_weights * delay_s
        return saved_s

    def _credit_s(self, duplicate_s: Floats) -> Floats:
        beyond_s = self.least_prefill_s - self.usual.least_prefill_s
        credit_s: Floats = np.minimum(self.owed_s, duplicate_s)
        if isinstance(beyond_s, float) and beyond_s <= 0:
            return credit_s
        credit_s -= credit_s * np.maximum(beyond_s, 0.0) / self.prefill_s
        return credit_s


def queue_s(at: Estimate) -> Floats:
    """Return the seconds until the pod begins with the request.

    Its queued prefill has to end, and the running step: of that, half is left on average, more if it has just begun. An
    early end is not relied on, because a request that comes a moment too late waits for the whole next step.
    """
    columns, step_s = at.pods.columns, at.step_s
    if isinstance(step_s, float) and not step_s:
        return at.queued_s
    left_s = np.maximum(step_s / 2, step_s - (at.request.now_s - columns.stepped_s))
    waits_s: Floats = np.maximum(at.queued_s, left_s * columns.is_busy)
    return waits_s


def prefill_s(at: Estimate) -> Seconds:
    """Return the seconds of the request's own prefill: `u * token_s + attention` of `u` uncached tokens
    (`latency.prefill_s`)."""
    seconds: Seconds = at.prefill_s
    return seconds


def decode_s(at: Estimate) -> Seconds:
    """Return the seconds of decoding in the steps of the prefill: `max(1, u / STEP_TOKENS)` times a step
    (`latency.decode_s`)."""
    if at.request.prompt_tokens <= STEP_TOKENS:
        return at.step_s
    seconds: Seconds = at.step_s * np.maximum(at.uncached / STEP_TOKENS, 1.0)
    return seconds


def fetch_s(at: Estimate) -> Seconds:
    """Return the seconds to fetch KV from tiers below the pool (`fetching.py`)."""
    if at.pods.tiers is None:
        return 0.0
    return fetch_or_compute_s(at.pods.tiers, at.cost, at.uncached, at.request.prompt_tokens)


def adapter_s(at: Estimate) -> Seconds:
    """Return the seconds until the pod has loaded the request's LoRA adapter (`views/adapters.py`)."""
    return 0.0 if at.pods.adapter_s is None else at.pods.adapter_s


def overhead_s(at: Estimate) -> Floats:
    """Return the fixed seconds of a request, which are learnt for pods that report no constants, and 0 for others.

    A pod that counts with the median pod's constants counts with its overhead, too, if one of the two has the fixed
    part of a step in these constants and the other in the overhead. So the fixed part counts once.
    """
    columns, speeds = at.pods.columns, at.speeds
    if not speeds.apart:
        return columns.overhead_s
    overheads_s = columns.overhead_s.copy()
    overheads_s[list(speeds.apart)] = overheads_s[speeds.median_row]
    return overheads_s


def externality_s(at: Estimate) -> Seconds:
    """Return the seconds by which the prefill delays requests that come later: its length, but at most the mean queue,
    because later requests go elsewhere from a pod with more."""
    delay_s: Seconds = lesser(at.prefill_s, float(at.queued_s.sum()) / len(at.queued_s))
    return delay_s


def shared_step_s(at: Estimate) -> Floats:
    """Return the seconds that the prefill adds to the step that it shares with a waiting request, at most a full
    step's."""
    full_step_s = STEP_TOKENS * at.cost.token_s
    shared_s: Floats = lesser(at.stalling_s, full_step_s) * at.pods.columns.has_waiting
    return shared_s


def stall_s(at: Estimate) -> Floats:
    """Return `STALL_WEIGHT` times the seconds by which the prefill delays the tokens of decoding requests."""
    delay_s: Floats = at.stall_weights * at.stalling_s
    return delay_s


def evict_s(at: Estimate) -> Seconds:
    """Return the seconds to compute again what a full pod evicts for the request, times the probability that this is
    asked for."""
    request, free_tokens = at.request, at.pods.free_tokens
    if not request.regret or free_tokens is None:
        return 0.0
    evicted = np.maximum(at.uncached + request.output_tokens - free_tokens, 0.0)
    again_s: Floats = request.regret * at.cost.token_s * evicted
    return again_s


def unseen_s(at: Estimate) -> Seconds:
    """Return the seconds of prefill that other gateways may have just sent to pods that are not this gateway's own
    (`views/pod_partition.py`)."""
    partition, pods = at.request.partition, at.pods
    if partition is None:
        return 0.0
    others_s: Floats = np.full(len(pods.table), partition.unseen_s)
    if pods.matched is not None:
        token_s, spared = float(np.min(at.cost.token_s)), pods.longest - float(pods.matched.min())
        others_s[pods.matched == pods.longest] = spared_unseen_s(partition, token_s, spared)
    own = partition.own_rows(len(pods.table))
    others_s[own.start : own.stop] = 0.0
    return others_s


def replication_s(at: Estimate) -> Seconds:
    """Return minus the seconds owed to the prefix, for a pod that would hold another copy of it (`replication.py`): at
    most what the copy costs the request.

    A request with more of its own to compute than usual gets only a part of it. Such a request waits for a pod that
    holds the prefix, and a later one makes the copy. Otherwise the slowest first tokens would get slower still.
    """
    return 0.0 if at.credit_s is None else -at.credit_s


def lesser(seconds: Any, limit: Any) -> Any:
    """Return the lesser of two numbers, for each pod if one of them is for each pod."""
    if isinstance(seconds, float) and isinstance(limit, float):
        return seconds if seconds <= limit else limit
    return np.minimum(seconds, limit)


Term = Callable[[Estimate], Seconds]
TTFT_TERMS: tuple[Term, ...] = (queue_s, prefill_s, decode_s, fetch_s, adapter_s, overhead_s)
DELAY_TERMS: tuple[Term, ...] = (externality_s, shared_step_s, stall_s, evict_s, unseen_s)
REPLICATION_TERMS: tuple[Term, ...] = (replication_s,)


def _sum(terms: Iterable[Term], at: Estimate) -> Seconds:
    total: Seconds = 0.0
    for term in terms:
        seconds = term(at)
        if type(seconds) is float and not seconds:
            continue  # adding 0 to an array takes as long as any other sum
        total = seconds if type(total) is float and not total else total + seconds
    return total
