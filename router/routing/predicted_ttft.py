"""`predicted_ttft`: the pod on which this request's first token, and the delay it causes others, cost least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.contract.load import StepCost
from router.routing.debt import Debts
from router.routing.latency import decode_s, prefill_s
from router.routing.pick import decide, lowest
from router.routing.recent import RecentWork
from router.routing.types import Decision, PodView, RequestInfo

_UNIT_TOKENS = 1000
_TIE_SHARE = 0.05
"""Scores closer than this share of the request's own prefill are equal: no prediction is better than that."""
_RECENT_HALF_LIFE_S = 60.0
"""About the time in which an unused prefix leaves a busy cache."""


@dataclass(slots=True)
class _Cost:
    """Seconds, as DESIGN.md 5 names them."""

    wait_s: float
    own_s: float
    step_s: float
    fetch_s: float
    externality_s: float
    pressure_s: float
    duplicate_s: float
    """Part of `own_s` that a pod with the longest match would be spared."""
    switch_s: float = 0.0
    credit_s: float = 0.0
    """What is owed to the prefix, taken off for a pod that would be a further copy."""

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.own_s + self.step_s + self.fetch_s

    @property
    def score_s(self) -> float:
        return self.ttft_s + self.externality_s + self.pressure_s + self.switch_s - self.credit_s


class PredictedTtft:
    """Everything in seconds, with constants learnt for each pod; the options are shares of those.

    Each request alone rather waits for a pod that holds its prefix than pays for another copy, though all that follow
    would profit from one. So what they lose by waiting is booked as a debt to the prefix; once that and what the
    request at hand would save make up the price of a copy, it is paid for. This is the rule of ski rental: paying
    when the losses reach the price costs at most twice what it would to know the future.
    """

    name = "predicted_ttft"

    def __init__(
        self, *, host_share: float, disk_share: float, pressure_weight: float, switch_margin: float, same_speed: float
    ) -> None:
        self._host_share = host_share
        self._disk_share = disk_share
        self._pressure_weight = pressure_weight
        self._switch_margin = switch_margin
        self._same_speed = same_speed
        self._debts = Debts()
        self._recent = RecentWork(_RECENT_HALF_LIFE_S)

    def choose(self, request: RequestInfo, pods: Sequence[PodView], *, explain: bool = False) -> Decision:
        """See `Policy.choose`; scores are seconds."""
        costs = self._costs(request, pods)
        strides = math.ceil(max(pod.matched_tokens for pod in pods) * len(request.keys) / request.prompt_tokens)
        account = self._debts.account(request.keys, min(strides, len(request.keys)))
        owed_s = 0.0 if account is None else self._debts.owed_s(account, request.now_s)
        for cost in costs:
            cost.switch_s = self._switch_margin * cost.duplicate_s
            cost.credit_s = min(owed_s, cost.duplicate_s + cost.switch_s)
        scores = [cost.score_s for cost in costs]
        chosen = self._choose_equal(request, pods, costs, scores)
        if explain:
            parts = [{name: getattr(cost, name) for name in _Cost.__slots__} for cost in costs]
            return decide(self.name, pods, chosen, scores, parts, costs[chosen].ttft_s)
        if account is not None:
            self._debts.book(account, _owed_after(costs, costs[chosen], owed_s), request.now_s)
        uncached = max(1, request.prompt_tokens - pods[chosen].matched_tokens)
        self._recent.add(pods[chosen].pod_id, uncached + request.output_tokens, request.now_s)
        return decide(self.name, pods, chosen, predicted_ttft_s=costs[chosen].ttft_s)

    def _choose_equal(
        self, request: RequestInfo, pods: Sequence[PodView], costs: Sequence[_Cost], scores: Sequence[float]
    ) -> int:
        """Of the pods hardly worse than the best, with no shorter match, the one with least recent work."""
        best = lowest(request, pods, scores)
        limit = scores[best] + _TIE_SHARE * costs[best].own_s
        least_match = pods[best].matched_tokens
        equals = [i for i, score in enumerate(scores) if score <= limit and pods[i].matched_tokens >= least_match]
        if len(equals) == 1:
            return best
        ranks = [math.inf] * len(pods)
        for i in equals:
            ranks[i] = self._recent.tokens(pods[i].pod_id, request.now_s)
        return lowest(request, pods, ranks)

    def _speeds(self, pods: Sequence[PodView]) -> list[StepCost]:
        """Each pod's constants; those of the median pod for pods of unknown speed, and for those about as fast.

        Learnt constants of equal pods differ by noise. Taken at their word they send every new prefix of an idle fleet
        to one pod, whose cache then turns over while the others' lie empty.
        """
        known = sorted((pod.cost for pod in pods if not pod.cost_is_prior), key=_unit_s)
        if not known:
            return [pod.cost for pod in pods]
        median = known[len(known) // 2]
        low, high = _unit_s(median) / (1 + self._same_speed), _unit_s(median) * (1 + self._same_speed)
        return [median if pod.cost_is_prior or low <= _unit_s(pod.cost) <= high else pod.cost for pod in pods]

    def _costs(self, request: RequestInfo, pods: Sequence[PodView]) -> list[_Cost]:
        speeds = self._speeds(pods)
        # The queue of a pod taken for as fast as its peers was reckoned at its own speed.
        waits_s = [
            max(0.0, pod.prefill_free_at_s - request.now_s) * (cost.token_s / pod.cost.token_s)
            for pod, cost in zip(pods, speeds, strict=True)
        ]
        mean_wait_s = math.fsum(waits_s) / len(pods)
        longest = max(pod.matched_tokens for pod in pods)
        return [
            self._cost(request, pod, cost, wait_s, mean_wait_s, longest)
            for pod, cost, wait_s in zip(pods, speeds, waits_s, strict=True)
        ]

    def _cost(
        self,
        request: RequestInfo,
        pod: PodView,
        cost: StepCost,
        wait_s: float,
        mean_wait_s: float,
        longest_match: int,
    ) -> _Cost:
        prompt = request.prompt_tokens
        step_s = decode_s(cost, pod.decoding, pod.context_tokens)
        own_s = prefill_s(cost, max(1, prompt - pod.matched_tokens), prompt)
        full = min(pod.kv_used, 0.98)
        return _Cost(
            # A pod with anything in flight is within a step, and a step that has begun is half over on average.
            wait_s=max(wait_s, step_s / 2 if pod.in_flight else 0.0),
            own_s=own_s,
            step_s=step_s,
            fetch_s=cost.token_s * (self._host_share * pod.host_tokens + self._disk_share * pod.disk_tokens),
            externality_s=min(own_s, mean_wait_s),
            # Out of blocks, the pod preempts: work of about this prompt's size is done twice, the likelier the fuller.
            pressure_s=self._pressure_weight * cost.token_s * prompt * full**4 / (1 - full),
            duplicate_s=own_s - prefill_s(cost, max(1, prompt - longest_match), prompt),
        )


def _owed_after(costs: Sequence[_Cost], chosen: _Cost, owed_s: float) -> float:
    """The debt after this request: paid down by a copy, else grown by what the request would have saved with one."""
    if chosen.duplicate_s > 0:
        return owed_s - chosen.credit_s
    lost_s = chosen.score_s - min(cost.score_s + cost.credit_s - cost.switch_s - cost.duplicate_s for cost in costs)
    return min(owed_s + max(0.0, lost_s), max(cost.duplicate_s + cost.switch_s for cost in costs))


def _unit_s(cost: StepCost) -> float:
    """One number for a pod's speed: seconds of a step of _UNIT_TOKENS prefill tokens."""
    return cost.base_s + _UNIT_TOKENS * cost.token_s
