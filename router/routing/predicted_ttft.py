"""`predicted_ttft`: the pod on which this request's first token, and the delay it causes others, cost least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.contract.load import StepCost
from router.routing.debt import Debts
from router.routing.latency import decode_s, further_steps, prefill_s
from router.routing.pick import decide, lowest
from router.routing.recent import RecentWork
from router.routing.types import Decision, PodView, RequestInfo

_UNIT_TOKENS = 1000
_TIE_SHARE = 0.6
"""Scores closer than this share of the request's own prefill, or of a usual prompt's if that is less, are equal: no
prediction of a queue is better. Seconds for a prompt fifty times as long as others would be no error of prediction."""
_UNSHARED_TIE_SHARE = 1.2
"""The same where traffic shares nothing: there, even arrivals at each pod are worth more than a short queue."""
_SHARED = 0.1
"""Mean part of a prompt that some pod holds, from which traffic counts as sharing."""
_FOLLOW = 0.02
"""Weight of a request in that mean, and in a usual prompt's prefill."""
_RECENT_HALF_LIFE_S = 60.0
"""About the time in which an unused prefix leaves a busy cache."""


@dataclass(slots=True)
class PodCost:
    """Seconds, as DESIGN.md 5 names them."""

    wait_s: float
    own_s: float
    step_s: float
    """Decoding in the steps of its prefill."""
    fetch_s: float
    externality_s: float
    pressure_s: float
    stall_s: float
    """For what its prefill keeps the decoding requests waiting."""
    duplicate_s: float
    """Part of `own_s` and `stall_s` that a pod with the longest match would be spared."""
    switch_s: float
    credit_s: float
    """What is owed to the prefix, taken off for a pod that would be a further copy."""

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.own_s + self.step_s + self.fetch_s


class PredictedTtft:
    """Everything in seconds, with constants learnt for each pod; the options are shares of those.

    Each request alone rather waits for a pod that holds its prefix than pays for another copy, though all that follow
    would profit from one. So what they lose by waiting is booked as a debt to the prefix; once that and what the
    request at hand would save make up the price of a copy, it is paid for. This is the rule of ski rental: paying
    when the losses reach the price costs at most twice what it would to know the future.
    """

    name = "predicted_ttft"

    def __init__(
        self,
        *,
        host_share: float,
        disk_share: float,
        pressure_weight: float,
        stall_weight: float,
        switch_margin: float,
        same_speed: float,
    ) -> None:
        self._host_share = host_share
        self._disk_share = disk_share
        self._pressure_weight = pressure_weight
        self._stall_weight = stall_weight
        self._switch_margin = switch_margin
        self._same_speed = same_speed
        self._debts = Debts()
        self._recent = RecentWork(_RECENT_HALF_LIFE_S)
        self._shared = 2 * _SHARED
        """Traffic counts as sharing until some 35 requests say otherwise."""
        self._usual_s = math.inf
        """Seconds of prefill of a usual prompt if nothing of it were cached; infinite: no request yet."""

    def choose(self, request: RequestInfo, pods: Sequence[PodView], *, explain: bool = False) -> Decision:
        """See `Policy.choose`; scores are seconds."""
        longest = max([pod.matched_tokens for pod in pods])
        strides = math.ceil(longest * len(request.keys) / request.prompt_tokens)
        account = self._debts.account(request.keys, min(strides, len(request.keys)))
        owed_s = 0.0 if account is None else self._debts.owed_s(account, request.now_s)
        costs, scores = self._costs(request, pods, longest, owed_s)
        chosen = self._choose_equal(request, pods, costs, scores)
        if explain:
            parts = [{name: getattr(cost, name) for name in PodCost.__slots__} for cost in costs]
            return decide(self.name, pods, chosen, scores, parts, costs[chosen].ttft_s)
        if account is not None:
            self._debts.book(account, _owed_after(costs, scores, chosen, owed_s), request.now_s)
        self._shared += _FOLLOW * (longest / request.prompt_tokens - self._shared)
        whole_s = prefill_s(pods[chosen].cost, request.prompt_tokens, request.prompt_tokens)
        self._usual_s = whole_s if math.isinf(self._usual_s) else self._usual_s + _FOLLOW * (whole_s - self._usual_s)
        uncached = max(1, request.prompt_tokens - pods[chosen].matched_tokens)
        self._recent.add(pods[chosen].pod_id, uncached + request.output_tokens, request.now_s)
        return decide(self.name, pods, chosen, predicted_ttft_s=costs[chosen].ttft_s)

    def ttfts_s(self, request: RequestInfo, pods: Sequence[PodView]) -> list[float]:
        """Seconds to the first token on each pod, as `choose` predicts them. The requests seen before play no part in
        them, and this one leaves no trace."""
        return [cost.ttft_s for cost in self._costs(request, pods, 0, 0.0)[0]]

    def _choose_equal(
        self, request: RequestInfo, pods: Sequence[PodView], costs: Sequence[PodCost], scores: Sequence[float]
    ) -> int:
        """Of the pods hardly worse than the best, with no shorter match, the one with least recent work."""
        best = lowest(request, pods, scores)
        own_s, least_match = costs[best].own_s, pods[best].matched_tokens
        tied_s = min(own_s, self._usual_s)
        limit = scores[best] + (_TIE_SHARE if self._shared >= _SHARED else _UNSHARED_TIE_SHARE) * tied_s
        most_own_s = own_s + _TIE_SHARE * own_s  # no pod of half the speed
        equals = [
            i
            for i, score in enumerate(scores)
            if score <= limit and pods[i].matched_tokens >= least_match and costs[i].own_s <= most_own_s
        ]
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
        # One number for a pod's speed: seconds of a step of _UNIT_TOKENS prefill tokens.
        units_s = [pod.cost.base_s + _UNIT_TOKENS * pod.cost.token_s for pod in pods]
        known = [i for i, pod in enumerate(pods) if not pod.cost_is_prior] or list(range(len(pods)))
        known.sort(key=units_s.__getitem__)
        middle = known[len(known) // 2]
        median, median_s = pods[middle].cost, units_s[middle]
        low_s, high_s = median_s / (1 + self._same_speed), median_s * (1 + self._same_speed)
        return [
            median if pod.cost_is_prior or low_s <= unit_s <= high_s else pod.cost
            for unit_s, pod in zip(units_s, pods, strict=True)
        ]

    def _costs(
        self, request: RequestInfo, pods: Sequence[PodView], longest_match: int, owed_s: float
    ) -> tuple[list[PodCost], list[float]]:
        """What each pod would cost, and its score. One loop with few calls: every request pays for it."""
        now_s, prompt = request.now_s, request.prompt_tokens
        speeds = self._speeds(pods)
        # The queue of a pod taken for as fast as its peers was reckoned at its own speed.
        waits_s = [
            (pod.prefill_free_at_s - now_s) * (cost.token_s / pod.cost.token_s)
            if pod.prefill_free_at_s > now_s
            else 0.0
            for pod, cost in zip(pods, speeds, strict=True)
        ]
        mean_wait_s = math.fsum(waits_s) / len(pods)
        least_tokens = max(1, prompt - longest_match)
        costs, scores = [], []
        last_cost, last_match = None, -1
        for pod, cost, wait_s in zip(pods, speeds, waits_s, strict=True):
            if cost is not last_cost or pod.matched_tokens != last_match:
                last_cost, last_match = cost, pod.matched_tokens  # most pods are equally fast and hold equally much
                uncached = max(1, prompt - last_match)
                own_s = prefill_s(cost, uncached, prompt)
                least_s = prefill_s(cost, least_tokens, prompt) if uncached > least_tokens else own_s
                # What decodes now has ended before a prefill much longer than usual does.
                stalled_s, least_stalled_s = min(own_s, self._usual_s), min(least_s, self._usual_s)
                externality_s = min(own_s, mean_wait_s)
                steps = 1 + further_steps(uncached)
            step_s = decode_s(cost, pod.decoding, pod.context_tokens)
            if pod.in_flight and wait_s < step_s / 2:
                wait_s = step_s / 2  # a pod with anything in flight is within a step, on average halfway
            step_s *= steps
            stall = self._stall_weight * pod.decoding
            stall_s = stall * stalled_s
            fetch_s = pressure_s = duplicate_s = switch_s = credit_s = 0.0
            if pod.host_tokens or pod.disk_tokens:
                fetch_s = cost.token_s * (self._host_share * pod.host_tokens + self._disk_share * pod.disk_tokens)
            if pod.kv_used:
                # Out of blocks, the pod preempts: work of about this size is done twice, the likelier the fuller.
                full = min(pod.kv_used, 0.98)
                pressure_s = self._pressure_weight * cost.token_s * prompt * full**4 / (1 - full)
            if uncached > least_tokens:
                duplicate_s = own_s - least_s + stall_s - stall * least_stalled_s
                switch_s = self._switch_margin * duplicate_s
                credit_s = min(owed_s, duplicate_s + switch_s)
            costs.append(
                PodCost(
                    wait_s,
                    own_s,
                    step_s,
                    fetch_s,
                    externality_s,
                    pressure_s,
                    stall_s,
                    duplicate_s,
                    switch_s,
                    credit_s,
                )
            )
            scores.append(
                wait_s + own_s + step_s + fetch_s + externality_s + pressure_s + stall_s + switch_s - credit_s
            )
        return costs, scores


def _owed_after(costs: Sequence[PodCost], scores: Sequence[float], chosen: int, owed_s: float) -> float:
    """The debt after this request: paid down by a copy, else moved by what the request lost, or won, against a copy on
    an average one of the other pods. Wins count too: queues that are long by chance are as often short.
    """
    if costs[chosen].duplicate_s > 0:
        return owed_s - costs[chosen].credit_s
    lacking = [(cost, score) for cost, score in zip(costs, scores, strict=True) if cost.duplicate_s > 0]
    if not lacking:
        return 0.0
    with_copy_s = math.fsum([s + cost.credit_s - cost.switch_s - cost.duplicate_s for cost, s in lacking])
    price_s = max([cost.duplicate_s + cost.switch_s for cost, _ in lacking])
    return min(max(0.0, owed_s + scores[chosen] - with_copy_s / len(lacking)), price_s)
