"""`predicted_ttft`: the pod on which this request's first token, and the delay it causes others, cost least."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from engine.contract.keys import PrefixKey
from engine.contract.load import StepCost
from router.routing.debt import Debts
from router.routing.fetching import fetch_or_compute_s
from router.routing.hindsight import rival_of, wide_rival_of
from router.routing.latency import STEP_TOKENS, further_steps, prefill_s, unit_s
from router.routing.parting import Parting, spared_unseen_s
from router.routing.pick import decide, lowest
from router.routing.recent import RecentWork, Turns
from router.routing.row import fullness
from router.routing.types import Decision, PodId, PodView, RequestInfo
from router.routing.weights import Weights
from router.routing.wide import Floats, Ints, WidePods, WidePolicy
from router.routing.wide_ttft import WideCosts, own_parts, wide_costs, wide_owed_after

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
_WARM = 0.5
"""Part of a prompt from which a pod that holds it counts as warm."""


class Costs:
    """What each pod would cost, in seconds: a list for each number, as an object for each pod takes most of the time.

    A score is the sum of a pod's `parts`, which are filled in only where they are asked for, less its credit.
    """

    __slots__ = ("credit_s", "duplicate_s", "own_s", "parts", "scores", "switch_s", "ttft_s")

    def __init__(self, pods: int) -> None:
        self.scores: list[float] = []
        self.ttft_s: list[float] = []
        self.own_s: list[float] = []
        self.duplicate_s = [0.0] * pods
        """Part of `own_s` and of what decoding waits for it that a pod with the longest match would be spared."""
        self.switch_s = [0.0] * pods
        self.credit_s = [0.0] * pods
        """What is owed to the prefix, taken off for a pod that would be a further copy."""
        self.parts: list[dict[str, float]] = []
        """By the names of DESIGN.md 5. `wait_s`; `own_s`; `step_s`: decoding in the steps of its prefill; `fetch_s`:
        to bring KV from host or disk, or an adapter; `overhead_s`; `externality_s`; `pressure_s`; `sharing_s`: for what
        its prefill adds to the step that it shares with a request that waits already; `stall_s`: for what its prefill
        keeps the decoding requests waiting; `evict_s`: for computing again what the pod evicts to make room;
        `others_s`: for what other gateways may have just sent there; and those above."""


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
        costs = self._costs(request, pods, longest, owed_s, explain=explain)
        chosen = self._choose_equal(request, pods, costs)
        pod, ttft_s = pods[chosen], costs.ttft_s[chosen]
        rival = rival_of(costs.ttft_s, costs.own_s, chosen)
        if explain:
            return decide(self.name, pods, chosen, costs.scores, costs.parts, ttft_s, rival)
        if account is not None:
            self._debts.book(account, _owed_after(costs, chosen, owed_s), request.now_s)
        self._remember(request, longest, pod.pod_id, pod.matched_tokens, pod.cost)
        return decide(self.name, pods, chosen, predicted_ttft_s=ttft_s, rival=rival)

    def choose_wide(self, request: RequestInfo, pods: WidePods) -> Decision:
        """See `WidePolicy.choose_wide`."""
        account, owed_s = self._owed(request, pods.longest)
        costs = wide_costs(request, pods, owed_s, self._usual_s, self._weights)
        chosen = self._choose_equal_wide(request, pods, costs)
        if account is not None:
            self._debts.book(account, wide_owed_after(costs, chosen, owed_s), request.now_s)
        table, matched = pods.table, pods.matched_by(chosen)
        self._remember(request, pods.longest, table.ids[chosen], matched, table.costs[chosen])
        rival = wide_rival_of(costs.ttft_s, costs.own_s, chosen)
        return Decision(chosen, self.name, matched, float(costs.ttft_s[chosen]), rival=rival)

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

    def sent_elsewhere(self, pod_id: PodId, tokens: int, now_s: float) -> None:
        """Another gateway sent a request to the pod, with so many tokens to compute: the pod had its turn."""
        self._turns.take(pod_id)
        self._recent.add(pod_id, tokens, now_s)

    def ttfts_s(self, request: RequestInfo, pods: Sequence[PodView]) -> list[float]:
        """Seconds to the first token on each pod, as `choose` predicts them. The requests seen before play no part in
        them, and this one leaves no trace."""
        return self._costs(request, pods, 0, 0.0).ttft_s

    def least_ttft_s(self, request: RequestInfo, pods: WidePods) -> float:
        """The least of them, of many pods."""
        return float(wide_costs(request, pods, 0.0, self._usual_s, self._weights).ttft_s.min())

    def _choose_equal(self, request: RequestInfo, pods: Sequence[PodView], costs: Costs) -> int:
        """Of the pods hardly worse than the best, with no shorter match, one with the fewest requests that wait for
        their first token. Among warm ones of these the pod whose last turn is longest ago: so arrivals at each come
        evenly. Among others the one with least recent work: what is computed there brings its like.

        Where scores are explained the parts say so: `tied` counts as good as the best, `tied_waiting` requests wait
        there, `tied_turn` is the place in the order of turns, from 1.
        """
        scores, owns_s = costs.scores, costs.own_s
        best = lowest(request, pods, scores)
        own_s, least_match = owns_s[best], pods[best].matched_tokens
        limit = scores[best] + self._tied_s(own_s)
        most_own_s = own_s + _TIE_SHARE * own_s  # no pod of half the speed
        equals = [
            i
            for i, score in enumerate(scores)
            if score <= limit
            and pods[i].matched_tokens >= least_match
            and owns_s[i] <= most_own_s
            and pods[i].adapter_s <= pods[best].adapter_s
        ]
        if len(equals) == 1:
            return best
        waiting = [max(0, pods[i].in_flight - pods[i].decoding) for i in equals]
        least = min(waiting)
        if costs.parts:
            for i, waits in zip(equals, waiting, strict=True):
                costs.parts[i] |= {"tied": 1.0, "tied_waiting": float(waits)}
        equals = [i for i, waits in zip(equals, waiting, strict=True) if waits == least]
        is_warm = least_match >= _WARM * request.prompt_tokens
        rank = self._turns.last if is_warm else self._recent.rank
        ranks = [math.inf] * len(pods)
        for i in equals:
            ranks[i] = rank(pods[i].pod_id)
        if request.parting is not None:
            self._rank_own(request.parting, ranks, equals, is_warm=is_warm)
        if costs.parts:
            for i in equals:
                costs.parts[i]["tied_turn"] = 1.0 + sum(ranks[other] < ranks[i] for other in equals)
        return lowest(request, pods, ranks)

    @staticmethod
    def _rank_own(parting: Parting, ranks: list[float], equals: Sequence[int], *, is_warm: bool) -> None:
        """Of the pods `equals` leave only the own ones, if there are any: others do not choose them. One that is partly
        another gateway's has its turn less often, or has had too much work sooner, by its part."""
        pods = len(ranks)
        own = parting.own_rows(pods)
        if not any(i in own for i in equals):
            return
        for i in equals:
            if i not in own:
                ranks[i] = math.inf
            elif is_warm:
                ranks[i] += parting.own_pods(pods) / parting.part(i, pods)
            else:
                ranks[i] /= parting.part(i, pods)

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
            if request.parting is not None:
                own, count = request.parting.own_rows(len(pods.table)), len(pods.table)
                is_own = (equals >= own.start) & (equals < own.stop)
                if is_own.any():
                    equals, ranks = equals[is_own], ranks[is_own]
                    parts = own_parts(request.parting, count)[equals]
                    ranks = ranks + request.parting.own_pods(count) / parts if is_warm else ranks / parts
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
        self,
        request: RequestInfo,
        pods: Sequence[PodView],
        longest_match: int,
        owed_s: float,
        *,
        explain: bool = False,
    ) -> Costs:
        """What each pod would cost, and its score. One loop with few calls: every request pays for it."""
        now_s, prompt, weights, usual_s = request.now_s, request.prompt_tokens, self._weights, self._usual_s
        stall_weight, switch_margin = weights.stall_weight, weights.switch_margin
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
        costs = Costs(len(pods))
        regret, parting = request.regret, request.parting
        spared_s, own = 0.0, range(0)
        if parting is not None:
            own = parting.own_rows(len(pods))
            spared_tokens = longest_match - min([pod.matched_tokens for pod in pods])
            spared_s = spared_unseen_s(parting, min([speed.token_s for speed in speeds]), spared_tokens)
        add_score, add_ttft, add_own = costs.scores.append, costs.ttft_s.append, costs.own_s.append
        last_cost, last_match = None, -1
        for i, (pod, cost, wait_s) in enumerate(zip(pods, speeds, waits_s, strict=True)):
            if cost is not last_cost or pod.matched_tokens != last_match:
                last_cost, last_match = cost, pod.matched_tokens  # most pods are equally fast and hold equally much
                uncached = max(1, prompt - last_match)
                own_s = prefill_s(cost, uncached, prompt)
                is_further = uncached > least_tokens
                least_s = prefill_s(cost, least_tokens, prompt) if is_further else own_s
                # What decodes now has ended before a prefill much longer than usual does.
                stalled_s = own_s if own_s < usual_s else usual_s
                least_stalled_s = least_s if least_s < usual_s else usual_s
                shared_s = min(stalled_s, STEP_TOKENS * cost.token_s)
                externality_s = own_s if own_s < mean_wait_s else mean_wait_s
                steps = 1 + further_steps(uncached)
            decoding, in_flight = pod.decoding, pod.in_flight
            step_s = cost.base_s + cost.sequence_s * decoding + cost.context_s * pod.context_tokens  # see `decode_s`
            if in_flight:
                left_s = step_s - (now_s - pod.stepped_s)  # see `step_left_s`
                if left_s < step_s / 2:
                    left_s = step_s / 2
                if left_s > wait_s:
                    wait_s = left_s
            step_s *= steps
            sharing_s = shared_s if in_flight > decoding else 0.0
            stall = stall_weight * decoding
            stall_s = stall * stalled_s
            evict_s = others_s = 0.0
            if regret and (evicted := uncached + request.output_tokens - pod.room_tokens) > 0:
                evict_s = regret * cost.token_s * evicted
            if parting is not None and i not in own:
                others_s = spared_s if last_match == longest_match else parting.unseen_s
            fetch_s = pressure_s = duplicate_s = switch_s = credit_s = 0.0
            if pod.host_tokens or pod.disk_tokens:
                fetch_s = fetch_or_compute_s(pod, cost, uncached, prompt, weights)
            if pod.adapter_s:
                fetch_s += pod.adapter_s
            if pod.kv_used:
                # Out of blocks, the pod preempts: work of about this size is done twice, the likelier the fuller.
                pressure_s = weights.pressure_weight * cost.token_s * prompt * fullness(pod.kv_used)
            if is_further:
                duplicate_s = costs.duplicate_s[i] = own_s - least_s + stall_s - stall * least_stalled_s
                switch_s = costs.switch_s[i] = switch_margin * duplicate_s
                if owed_s:
                    credit_s = costs.credit_s[i] = min(owed_s, duplicate_s + switch_s)
            ttft_s = wait_s + own_s + step_s + fetch_s + pod.overhead_s
            add_ttft(ttft_s)
            add_own(own_s)
            add_score(
                ttft_s + externality_s + pressure_s + sharing_s + stall_s + evict_s + others_s + switch_s - credit_s
            )
            if explain:
                costs.parts.append(
                    {
                        "wait_s": wait_s,
                        "own_s": own_s,
                        "step_s": step_s,
                        "fetch_s": fetch_s,
                        "overhead_s": pod.overhead_s,
                        "externality_s": externality_s,
                        "pressure_s": pressure_s,
                        "sharing_s": sharing_s,
                        "stall_s": stall_s,
                        "evict_s": evict_s,
                        "others_s": others_s,
                        "duplicate_s": duplicate_s,
                        "switch_s": switch_s,
                        "credit_s": credit_s,
                    }
                )
        return costs


def _is_same(numbers: float | Floats, rows: Ints) -> bool:
    return isinstance(numbers, float) or bool((numbers[rows] == numbers[rows[0]]).all())


def _owed_after(costs: Costs, chosen: int, owed_s: float) -> float:
    """The debt after this request: paid down by a copy, and grown by what one more copy would have spared it, on an
    average one of the other pods. Where a copy would have been no better, the request would not have gone there.
    """
    scores, duplicates_s = costs.scores, costs.duplicate_s
    lacking = [i for i, duplicate_s in enumerate(duplicates_s) if duplicate_s > 0]
    if not lacking:
        return 0.0
    best_s, credits_s, switches_s = scores[chosen], costs.credit_s, costs.switch_s
    if duplicates_s[chosen] > 0:
        best_s = min([score for score, duplicate_s in zip(scores, duplicates_s, strict=True) if duplicate_s <= 0])
        # What it saves by not waiting for a pod that has one, the request pays itself.
        owed_s -= min(credits_s[chosen], max(0.0, scores[chosen] + credits_s[chosen] - best_s))
    with_copies_s = [scores[i] + credits_s[i] - switches_s[i] - duplicates_s[i] for i in lacking]
    spared_s = math.fsum([max(0.0, best_s - with_copy_s) for with_copy_s in with_copies_s]) / len(lacking)
    price_s = max([duplicates_s[i] + switches_s[i] for i in lacking])
    return min(owed_s + spared_s, price_s)
