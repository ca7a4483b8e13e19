"""`predicted_ttft`: the pod on which this request's first token, and the delay it causes others, cost least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.contract.keys import PrefixKey
from engine.contract.load import StepCost
from router.routing.debt import Debts
from router.routing.latency import STEP_TOKENS, decode_s, further_steps, prefill_s, step_left_s, unit_s
from router.routing.pick import decide, lowest
from router.routing.recent import RecentWork, Turns
from router.routing.row import fullness
from router.routing.types import Decision, PodId, PodView, RequestInfo
from router.routing.unseen import Unseen
from router.routing.wide import Floats, Ints, WidePods, WidePolicy
from router.routing.wide_ttft import Weights, WideCosts, wide_costs, wide_owed_after

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
import os
U=float(os.environ.get('U','1'))
W=float(os.environ.get("W","1"))
_WARM = 0.5
"""Part of a prompt from which a pod that holds it counts as warm."""


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
    sharing_s: float
    """For what its prefill adds to the step that it shares with a request that waits already."""
    stall_s: float
    """For what its prefill keeps the decoding requests waiting."""
    evict_s: float
    """For computing again what the pod evicts to make room."""
    duplicate_s: float
    """Part of `own_s` and `stall_s` that a pod with the longest match would be spared."""
    switch_s: float
    credit_s: float
    """What is owed to the prefix, taken off for a pod that would be a further copy."""

    @property
    def ttft_s(self) -> float:
        return self.wait_s + self.own_s + self.step_s + self.fetch_s


class PredictedTtft(WidePolicy):
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
        self._weights = Weights(host_share, disk_share, pressure_weight, stall_weight, switch_margin, same_speed)
        self.unseen = Unseen()
        self._debts = Debts()
        self._turns = Turns()
        self._recent = RecentWork(_RECENT_HALF_LIFE_S)
        self._shared = 2 * _SHARED
        """Traffic counts as sharing until some 35 requests say otherwise."""
        self._usual_s = math.inf
        """Seconds of prefill of a usual prompt if nothing of it were cached; infinite: no request yet."""

    def choose(self, request: RequestInfo, pods: Sequence[PodView], *, explain: bool = False) -> Decision:
        """See `Policy.choose`; scores are seconds."""
        longest = max([pod.matched_tokens for pod in pods])
        account, owed_s = self._owed(request, longest)
        costs, scores = self._costs(request, pods, longest, owed_s)
        chosen = self._choose_equal(request, pods, costs, scores)
        pod, ttft_s = pods[chosen], costs[chosen].ttft_s
        if explain:
            parts = [{name: getattr(cost, name) for name in PodCost.__slots__} for cost in costs]
            return decide(self.name, pods, chosen, scores, parts, ttft_s)
        if account is not None:
            self._debts.book(account, _owed_after(costs, scores, chosen, owed_s), request.now_s)
        self._remember(request, longest, pod.pod_id, pod.matched_tokens, pod.cost)
        return decide(self.name, pods, chosen, predicted_ttft_s=ttft_s)

    def choose_wide(self, request: RequestInfo, pods: WidePods) -> Decision:
        """See `WidePolicy.choose_wide`."""
        account, owed_s = self._owed(request, pods.longest)
        costs = wide_costs(request, pods, owed_s, self._usual_s, self._weights)
        chosen = self._choose_equal_wide(request, pods, costs)
        if account is not None:
            self._debts.book(account, wide_owed_after(costs, chosen, owed_s), request.now_s)
        table, matched = pods.table, pods.matched_by(chosen)
        self._remember(request, pods.longest, table.ids[chosen], matched, table.costs[chosen])
        return Decision(chosen, self.name, matched, float(costs.ttft_s[chosen]))

    def _owed(self, request: RequestInfo, longest_match: int) -> tuple[PrefixKey | None, float]:
        """The account of what pods hold of the request, and what is on it."""
        strides = math.ceil(longest_match * len(request.keys) / request.prompt_tokens)
        account = self._debts.account(request.keys, min(strides, len(request.keys)))
        return account, 0.0 if account is None else self._debts.owed_s(account, request.now_s)

    def _remember(self, request: RequestInfo, longest_match: int, pod_id: PodId, matched: int, cost: StepCost) -> None:
        """The request goes to the pod, which has those constants and holds so much of it."""
        self._shared += _FOLLOW * (longest_match / request.prompt_tokens - self._shared)
        whole_s = prefill_s(cost, request.prompt_tokens, request.prompt_tokens)
        self._usual_s = whole_s if math.isinf(self._usual_s) else self._usual_s + _FOLLOW * (whole_s - self._usual_s)
        self._turns.take(pod_id)
        self._recent.add(pod_id, max(1, request.prompt_tokens - matched) + request.output_tokens, request.now_s)

    def ttfts_s(self, request: RequestInfo, pods: Sequence[PodView]) -> list[float]:
        """Seconds to the first token on each pod, as `choose` predicts them. The requests seen before play no part in
        them, and this one leaves no trace."""
        return [cost.ttft_s for cost in self._costs(request, pods, 0, 0.0)[0]]

    def _choose_equal(
        self, request: RequestInfo, pods: Sequence[PodView], costs: Sequence[PodCost], scores: Sequence[float]
    ) -> int:
        """Of the pods hardly worse than the best, with no shorter match, one with the fewest requests that wait for
        their first token. Among warm ones of these the pod whose last turn is longest ago: so arrivals at each come
        evenly. Among others the one with least recent work: what is computed there brings its like."""
        best = lowest(request, pods, scores)
        own_s, least_match = costs[best].own_s, pods[best].matched_tokens
        limit = scores[best] + self._tied_s(own_s)
        most_own_s = own_s + _TIE_SHARE * own_s  # no pod of half the speed
        equals = [
            i
            for i, score in enumerate(scores)
            if score <= limit and pods[i].matched_tokens >= least_match and costs[i].own_s <= most_own_s
        ]
        if len(equals) == 1:
            return best
        waiting = [max(0, pod.in_flight - pod.decoding) for pod in pods]
        least = min([waiting[i] for i in equals])
        is_warm = least_match >= _WARM * request.prompt_tokens
        ranks = [math.inf] * len(pods)
        equals = [i for i in equals if waiting[i] == least]
        if self.unseen.per_pod_s(len(pods), request.now_s):
            parts = [self.unseen.own_part(i, len(pods)) for i in equals]
            equals = [i for i, part in zip(equals, parts, strict=True) if part == max(parts)]
        for i in equals:
            pod_id = pods[i].pod_id
            ranks[i] = self._turns.last(pod_id) if is_warm else self._recent.rank(pod_id)
        return lowest(request, pods, ranks)

    def _choose_equal_wide(self, request: RequestInfo, pods: WidePods, costs: WideCosts) -> int:
        """As `_choose_equal`."""
        scores, columns, matched = costs.scores, pods.columns, pods.matched
        tied = (scores == scores.min()).nonzero()[0]
        best = int(tied[0])
        if len(tied) > 1 and not (_is_same(costs.own_s, tied) and (matched is None or _is_same(matched, tied))):
            best = pods.spread(request, tied)
        own_s = costs.own_s if isinstance(costs.own_s, float) else float(costs.own_s[best])
        least_match = pods.matched_by(best)
        limit, most_own_s = float(scores[best]) + self._tied_s(own_s), own_s + _TIE_SHARE * own_s
        is_equal = scores <= limit
        if matched is not None:
            is_equal &= matched >= least_match
        if not isinstance(costs.own_s, float):
            is_equal &= costs.own_s <= most_own_s
        equals = is_equal.nonzero()[0]
        if len(equals) > 1:
            waiting = np.maximum(columns.in_flight[equals] - columns.decoding[equals], 0.0)
            equals = equals[waiting == waiting.min()]
        if len(equals) > 1:
            is_warm = least_match >= _WARM * request.prompt_tokens
            ids = pods.table.ids
            ranks = (self._turns.lasts(ids) if is_warm else self._recent.ranks(ids))[equals]
            equals = equals[ranks == ranks.min()]
        return int(equals[0]) if len(equals) == 1 else pods.spread(request, equals)

    def _tied_s(self, own_s: float) -> float:
        """Seconds by which scores may differ and count as equal, for a request that takes `own_s` on the best pod."""
        share = _TIE_SHARE if self._shared >= _SHARED else _UNSHARED_TIE_SHARE
        return share * min(own_s, self._usual_s)

    def _speeds(self, pods: Sequence[PodView]) -> list[StepCost]:
        """Each pod's constants; those of the median pod for pods of unknown speed, and for those about as fast.

        Learnt constants of equal pods differ by noise. Taken at their word they send every new prefix of an idle fleet
        to one pod, whose cache then turns over while the others' lie empty.
        """
        units_s = [unit_s(pod.cost) for pod in pods]
        known = [i for i, pod in enumerate(pods) if not pod.cost_is_prior] or list(range(len(pods)))
        known.sort(key=units_s.__getitem__)
        middle = known[len(known) // 2]
        median, median_s = pods[middle].cost, units_s[middle]
        low_s, high_s = median_s / (1 + self._weights.same_speed), median_s * (1 + self._weights.same_speed)
        return [
            median if pod.cost_is_prior or low_s <= pod_unit_s <= high_s else pod.cost
            for pod_unit_s, pod in zip(units_s, pods, strict=True)
        ]

    def _costs(
        self, request: RequestInfo, pods: Sequence[PodView], longest_match: int, owed_s: float
    ) -> tuple[list[PodCost], list[float]]:
        """What each pod would cost, and its score. One loop with few calls: every request pays for it."""
        now_s, prompt, weights, regret = request.now_s, request.prompt_tokens, self._weights, request.regret
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
        unseen_s = self.unseen.per_pod_s(len(pods), now_s)
        for row, (pod, cost, wait_s) in enumerate(zip(pods, speeds, waits_s, strict=True)):
            if unseen_s:
                wait_s += U * unseen_s * (1 - self.unseen.own_part(row, len(pods)))
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
            if pod.in_flight:
                wait_s = max(wait_s, step_left_s(step_s, now_s - pod.stepped_s))
            step_s *= steps
            sharing_s = min(stalled_s, STEP_TOKENS * cost.token_s) if pod.in_flight > pod.decoding else 0.0
            stall = weights.stall_weight * pod.decoding
            stall_s = stall * stalled_s
            fetch_s = pressure_s = duplicate_s = switch_s = credit_s = 0.0
            if pod.host_tokens or pod.disk_tokens:
                fetch_s = cost.token_s * (weights.host_share * pod.host_tokens + weights.disk_share * pod.disk_tokens)
            if pod.kv_used:
                # Out of blocks, the pod preempts: work of about this size is done twice, the likelier the fuller.
                pressure_s = weights.pressure_weight * cost.token_s * prompt * fullness(pod.kv_used)
            evict_s = 0.0
            if regret and pod.room_tokens < uncached + request.output_tokens:
                evicted = uncached + request.output_tokens - pod.room_tokens
                evict_s = W * regret * cost.token_s * evicted
            if uncached > least_tokens:
                duplicate_s = own_s - least_s + stall_s - stall * least_stalled_s
                switch_s = weights.switch_margin * duplicate_s
                credit_s = min(owed_s, duplicate_s + switch_s)
            costs.append(
                PodCost(
                    wait_s,
                    own_s,
                    step_s,
                    fetch_s,
                    externality_s,
                    pressure_s,
                    sharing_s,
                    stall_s,
                    evict_s,
                    duplicate_s,
                    switch_s,
                    credit_s,
                )
            )
            scores.append(
                wait_s
                + own_s
                + step_s
                + fetch_s
                + externality_s
                + pressure_s
                + sharing_s
                + stall_s
                + evict_s
                + switch_s
                - credit_s
            )
        return costs, scores


def _is_same(numbers: float | Floats, rows: Ints) -> bool:
    return isinstance(numbers, float) or bool((numbers[rows] == numbers[rows[0]]).all())


def _owed_after(costs: Sequence[PodCost], scores: Sequence[float], chosen: int, owed_s: float) -> float:
    """The debt after this request: paid down by a copy, and grown by what one more copy would have spared it, on an
    average one of the other pods. Where a copy would have been no better, the request would not have gone there.
    """
    lacking = [(cost, score) for cost, score in zip(costs, scores, strict=True) if cost.duplicate_s > 0]
    if not lacking:
        return 0.0
    best_s = scores[chosen]
    if costs[chosen].duplicate_s > 0:
        best_s = min([score for cost, score in zip(costs, scores, strict=True) if cost.duplicate_s <= 0])
        # What it saves by not waiting for a pod that has one, the request pays itself.
        owed_s -= min(costs[chosen].credit_s, max(0.0, scores[chosen] + costs[chosen].credit_s - best_s))
    with_copies_s = [s + cost.credit_s - cost.switch_s - cost.duplicate_s for cost, s in lacking]
    spared_s = math.fsum([max(0.0, best_s - with_copy_s) for with_copy_s in with_copies_s]) / len(lacking)
    price_s = max([cost.duplicate_s + cost.switch_s for cost, _ in lacking])
    return min(owed_s + spared_s, price_s)
