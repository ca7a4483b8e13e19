"""`predicted_ttft`: chooses the pod with the least time to first token plus delay to other requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from engine.contract.keys import PrefixKey
from engine.contract.load import StepCost
from router.routing import ties
from router.routing.debt import Debts
from router.routing.fetching import fetch_or_compute_s, reaching, wide_reaching
from router.routing.hindsight import rival_of, wide_rival_of
from router.routing.recent import RecentWork, Turns
from router.routing.terms import Costing, Usual
from router.routing.weights import Weights
from router.routing.wide_ttft import wide_owed_after
from router.views.latency import EVENNESS, STEP_TOKENS, decode_s, further_steps, has_fixed, prefill_s, unit_s
from router.views.pick import decide, lowest
from router.views.pod_partition import Parting, spared_unseen_s
from router.views.row import fullness
from router.views.table import Floats, Ints, WidePods, WidePolicy
from router.views.types import Decision, PodId, PodView, RequestInfo

_TIE_SHARE = 0.6
"""Scores that differ by less than this share of a prefill count as equal: predictions of queues err by as much. The
prefill is the request's own, or a usual prompt's if that is less: for a prompt fifty times as long, a share of its own
prefill would be seconds, far more than a prediction errs."""
_UNSHARED_TIE_SHARE = 1.2
"""The same share for traffic that shares nothing: steady arrivals at each pod are then worth more than short queues."""
_SHARED = 0.1
"""Traffic counts as sharing if some pod holds this share of a prompt on average."""
_FOLLOW = 0.02
"""Weight of a request in the mean shared part, and in a usual prompt's prefill."""
_RECENT_HALF_LIFE_S = 60.0
"""About the time in which an unused prefix leaves a busy cache."""
_WARM = 0.5
"""A pod that holds at least this part of a prompt counts as warm."""


class Costs:
    """What each pod would cost, in seconds. It has a list for each number, because an object for each pod would take
    most of the time of a decision.

    A score is the sum of a pod's `parts` without `duplicate_s`, less `credit_s`. `parts` are filled only on request.
    """

    __slots__ = ("credit_s", "duplicate_s", "own_s", "parts", "scores", "switch_s", "ttft_s", "uneven_s")

    def __init__(self, pods: int) -> None:
        self.scores: list[float] = []
        self.ttft_s: list[float] = []
        self.own_s: list[float] = []
        self.duplicate_s = [0.0] * pods
        """Seconds that a pod with the longest match would save: of prefill, and of the delay to decoding requests."""
        self.switch_s = [0.0] * pods
        self.credit_s = [0.0] * pods
        """The debt to the prefix, taken off the score of a pod that would hold a further copy. A request with more
        of its own to compute than usual gets only a part of it. Such a request waits for a pod that holds the prefix,
        and a later one makes the copy. Otherwise the slowest first tokens would get slower still."""
        self.uneven_s = [0.0] * pods
        """Surcharge on a pod among equally warm ones, because it was sent a request less than a step ago: see
        `EVENNESS`. It is no part of the score."""
        self.parts: list[dict[str, float]] = []
        """Terms of each score by name: `wait_s`; `own_s`; `step_s`, decoding in the steps of the
        prefill; `fetch_s`, fetching KV from the tiers, or an adapter; `overhead_s`; `externality_s`; `pressure_s`;
        `sharing_s`, what the prefill adds to the step that it shares with a waiting request; `stall_s`, how long the
        prefill delays decoding requests; `evict_s`, computing again what the pod evicts to make room; `others_s`, what
        other gateways may have just sent to the pod; and `duplicate_s`, `switch_s` and `credit_s`, as above."""


class _Speeds(NamedTuple):
    """The constants that each pod counts with."""

    costs: list[StepCost]
    median: int
    """Place of the median pod."""
    apart: tuple[int, ...]
    """Places of pods that count with the median pod's constants, although one of the two has the fixed part of a step
    in `base_s`, and the other has it in the overhead. Such a pod counts with the median pod's overhead, too, so that
    the fixed part counts once."""


class PredictedTtft(WidePolicy):
    """Scores each pod in seconds, with constants learnt for each pod. The options are relative to these constants.

    A single request loses less by waiting for a pod that holds its prefix than by computing another copy, though all
    later requests would profit from the copy. So what requests lose by waiting is booked as a debt to the prefix. Once
    the debt and what the current request would save reach the price of a copy, a copy is made. This is the rule of ski
    rental: paying when the losses reach the price costs at most twice what perfect foresight would.
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
        self._last_speeds: tuple[list[StepCost], list[bool], _Speeds] = ([], [], _Speeds([], 0, ()))
        """The pods' own constants, whether each is a prior, and what `_speeds` made of them."""
        self._turns = Turns()
        self._recent = RecentWork(_RECENT_HALF_LIFE_S)
        self._shared = 2 * _SHARED
        """Mean shared part of a prompt; traffic counts as sharing until some 35 requests say otherwise."""
        self._usual_s = math.inf
        """Seconds of prefill of a usual prompt if nothing of it were cached; infinite before the first request."""
        self._usual_least_s = math.inf
        """Seconds of prefill of the part of a usual prompt that no pod holds."""

    def choose(self, request: RequestInfo, pods: Sequence[PodView], *, explain: bool = False) -> Decision:
        """See `Policy.choose`; scores are seconds."""
        pods = reaching(pods)
        longest = max([pod.matched_tokens for pod in pods])
        lacking = None
        if request.parting is not None and request.parting.is_told:
            lacking = sum([pod.matched_tokens < longest for pod in pods])
        account, owed_s = self._owed(request, longest, lacking)
        costs = self._costs(request, pods, longest, owed_s, explain=explain)
        chosen = self._choose_equal(request, pods, costs)
        pod, ttft_s = pods[chosen], costs.ttft_s[chosen]
        rival = rival_of(costs.ttft_s, costs.own_s, chosen)
        if explain:
            return decide(self.name, pods, chosen, costs.scores, costs.parts, ttft_s, rival)
        if account is not None:
            owed_s = _owed_after(costs, chosen, owed_s, request.share)
            self._debts.book(account, owed_s, request.now_s, (lacking or 0) - (pod.matched_tokens < longest))
        self._remember(request, longest, pod.pod_id, pod.matched_tokens, pod.cost)
        return decide(self.name, pods, chosen, predicted_ttft_s=ttft_s, rival=rival)

    def choose_wide(self, request: RequestInfo, pods: WidePods) -> Decision:
        """See `WidePolicy.choose_wide`."""
        pods = wide_reaching(pods)
        matched, lacking = pods.matched, None
        if request.parting is not None and request.parting.is_told:
            lacking = 0 if matched is None else int((matched < pods.longest).sum())
        account, owed_s = self._owed(request, pods.longest, lacking)
        at = Costing(request, pods, Usual(self._usual_s, self._usual_least_s), owed_s, self._weights)
        chosen = ties.choose(self._tie(at))
        table, held = pods.table, pods.matched_by(chosen)
        if account is not None:
            owed_s = wide_owed_after(at, chosen, owed_s, request.share)
            self._debts.book(account, owed_s, request.now_s, (lacking or 0) - (held < pods.longest))
        self._remember(request, pods.longest, table.ids[chosen], held, table.costs[chosen])
        rival = wide_rival_of(at.ttft_s, at.prefill_s, chosen)
        return Decision(chosen, self.name, held, float(at.ttft_s[chosen]), rival=rival)

    def _tie(self, at: Costing) -> ties.Tie:
        scores, matched = at.scores, at.pods.matched
        tied = (scores == scores.min()).nonzero()[0]
        best = int(tied[0])
        if len(tied) > 1 and not (_is_same(at.prefill_s, tied) and (matched is None or _is_same(matched, tied))):
            best = at.pods.spread(at.request, tied)
        own_s = at.prefill_s if isinstance(at.prefill_s, float) else float(at.prefill_s[best])
        return ties.Tie(at, best, self._tied_s(own_s), self._turns, self._recent)

    def _owed(self, request: RequestInfo, longest_match: int, lacking: int | None) -> tuple[PrefixKey | None, float]:
        """Return the account of the request's longest match, and the debt on it. `lacking`: see `Debts.owed_s`."""
        strides = math.ceil(longest_match * len(request.keys) / request.prompt_tokens)
        account = self._debts.account(request.keys, min(strides, len(request.keys)))
        return account, 0.0 if account is None else self._debts.owed_s(account, request.now_s, lacking)

    def _remember(self, request: RequestInfo, longest_match: int, pod_id: PodId, matched: int, cost: StepCost) -> None:
        """Note that the request goes to the pod, which has the constants `cost` and holds `matched` tokens of it."""
        self._shared += _FOLLOW * (longest_match / request.prompt_tokens - self._shared)
        prompt = request.prompt_tokens
        self._usual_s = _follow(self._usual_s, prefill_s(cost, prompt, prompt))
        self._usual_least_s = _follow(self._usual_least_s, prefill_s(cost, max(1, prompt - longest_match), prompt))
        self._turns.take(pod_id)
        self._recent.add(pod_id, max(1, request.prompt_tokens - matched) + request.output_tokens, request.now_s)

    def sent_elsewhere(self, pod_id: PodId, tokens: int, now_s: float) -> None:
        """Count a request that another gateway sent to the pod, with `tokens` to compute, as the pod's turn."""
        self._turns.take(pod_id)
        self._recent.add(pod_id, tokens, now_s)

    def ttfts_s(self, request: RequestInfo, pods: Sequence[PodView]) -> list[float]:
        """Return the seconds to the first token on each pod, as `choose` predicts them. Requests seen before play no
        part, and the call changes no state."""
        return self._costs(request, reaching(pods), 0, 0.0).ttft_s

    def least_ttft_s(self, request: RequestInfo, pods: WidePods) -> float:
        """Return the least `ttfts_s` of many pods."""
        at = Costing(request, wide_reaching(pods), Usual(self._usual_s, self._usual_least_s), 0.0, self._weights)
        return float(at.ttft_s.min())

    def _choose_equal(self, request: RequestInfo, pods: Sequence[PodView], costs: Costs) -> int:
        """Choose among the pods that are hardly worse than the best and have no shorter match.

        Only the pods with the fewest requests that wait for a first token are considered. If this is the only gateway
        and some of these pods are idle, only the idle ones are. If the pods are warm, the one whose last turn is
        longest ago is chosen: then arrivals at each pod come evenly. Otherwise it is the pod with the least recent
        work, because a prompt computed on a pod attracts similar ones.

        Warm pods are compared with `Costs.uneven_s` added if this is the only gateway: it does not know when others
        last sent a request. A warm pod may be worse than the best by the margin of a tie plus the uncertainty about
        the running step's end, but by no more: turns do not outweigh a prefill that is known to be in the way.

        If scores are explained, the parts of a pod show the outcome: `tied_uneven_s` was added, `tied` is 1 if the pod
        counts as equal to the best, `tied_waiting` requests wait for a first token, `tied_idle` is 1 if it has no
        requests at all, and `tied_turn` is its place in the order of turns, from 1.
        """
        scores, owns_s = costs.scores, costs.own_s
        best = lowest(request, pods, scores)
        own_s, least_match = owns_s[best], pods[best].matched_tokens
        most_own_s = own_s + _TIE_SHARE * own_s  # this leaves out a pod of half the speed
        is_warm = least_match >= _WARM * request.prompt_tokens
        most_adapter_s = pods[best].adapter_s
        is_evened = is_warm and request.parting is None and any(costs.uneven_s)
        limit = scores[best] + self._tied_s(own_s)
        if is_evened:
            limit += _unsure_s(pods[best].cost, pods[best].decoding, pods[best].context_tokens)
        equals = [
            i
            for i, score in enumerate(scores)
            if score <= limit
            and pods[i].matched_tokens >= least_match
            and owns_s[i] <= most_own_s
            and pods[i].adapter_s <= most_adapter_s
        ]
        if is_evened:
            equals = self._evenest(equals, costs, own_s)
        if len(equals) == 1:
            return equals[0]
        waiting = [max(0, pods[i].in_flight - pods[i].decoding) for i in equals]
        least = min(waiting)
        if costs.parts:
            for i, waits in zip(equals, waiting, strict=True):
                is_idle = not pods[i].in_flight and request.parting is None
                costs.parts[i] |= {"tied": 1.0, "tied_waiting": float(waits), "tied_idle": float(is_idle)}
        equals = [i for i, waits in zip(equals, waiting, strict=True) if waits == least]
        if request.parting is None and (idle := [i for i in equals if not pods[i].in_flight]):
            equals = idle
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

    def _evenest(self, rows: Sequence[int], costs: Costs, own_s: float) -> list[int]:
        """Return those of `rows` that are hardly worse than the best of them with `Costs.uneven_s` added."""
        scores = [costs.scores[i] + costs.uneven_s[i] for i in rows]
        if costs.parts:
            for i in rows:
                costs.parts[i]["tied_uneven_s"] = costs.uneven_s[i]
        limit = min(scores) + self._tied_s(own_s)
        return [i for i, score in zip(rows, scores, strict=True) if score <= limit]

    @staticmethod
    def _rank_own(parting: Parting, ranks: list[float], equals: Sequence[int], *, is_warm: bool) -> None:
        """Leave only this gateway's own pods of `equals`, if there are any, because other gateways avoid these.

        If a pod belongs to this gateway only in part, it has its turn less often, or its recent work counts for more.
        If all pods belong to others, the order is that of `Parting.guest_ranks`."""
        pods = len(ranks)
        own = parting.own_rows(pods)
        if not any(i in own for i in equals):
            guest_ranks = parting.guest_ranks(equals, [ranks[i] for i in equals], pods)
            for i, rank in zip(equals, guest_ranks, strict=True):
                ranks[i] = rank
            return
        for i in equals:
            if i not in own:
                ranks[i] = math.inf
            elif is_warm:
                ranks[i] += parting.own_pods(pods) / parting.part(i, pods)
            else:
                ranks[i] /= parting.part(i, pods)

    def _tied_s(self, own_s: float) -> float:
        """Return the seconds by which equal scores may differ, for a request that takes `own_s` on the best pod."""
        share = ties.TIE_SHARE if self._shared >= _SHARED else ties.UNSHARED_TIE_SHARE
        return share * min(own_s, self._usual_s)

    def _speeds(self, pods: Sequence[PodView]) -> _Speeds:
        """Return each pod's constants. Pods of unknown speed, and pods about as fast as the median, get the median's.

        Learnt constants of equal pods differ by noise. Taken literally, they send every new prefix of an idle fleet to
        one pod. Its cache then turns over while the other caches lie empty.
        """
        costs, priors = [pod.cost for pod in pods], [pod.cost_is_prior for pod in pods]
        last, last_priors, found = self._last_speeds
        if costs != last or priors != last_priors:  # they change far less often than requests come
            found = self._reckoned_speeds(pods)
            self._last_speeds = costs, priors, found
        return found

    def _reckoned_speeds(self, pods: Sequence[PodView]) -> _Speeds:
        units_s = [unit_s(pod.cost) for pod in pods]
        known = [i for i, pod in enumerate(pods) if not pod.cost_is_prior] or list(range(len(pods)))
        known.sort(key=units_s.__getitem__)
        middle = known[len(known) // 2]
        median, median_s = pods[middle].cost, units_s[middle]
        low_s, high_s = median_s / (1 + self._weights.same_speed), median_s * (1 + self._weights.same_speed)
        costs = [
            median if pod.cost_is_prior or low_s <= pod_unit_s <= high_s else pod.cost
            for pod_unit_s, pod in zip(units_s, pods, strict=True)
        ]
        apart = [i for i, pod in enumerate(pods) if costs[i] is median and has_fixed(pod.cost) != has_fixed(median)]
        return _Speeds(costs, middle, tuple(apart))

    def _costs(
        self,
        request: RequestInfo,
        pods: Sequence[PodView],
        longest_match: int,
        owed_s: float,
        *,
        explain: bool = False,
    ) -> Costs:
        """Return what each pod would cost, and its score. One loop with few calls: every request pays for it."""
        now_s, prompt, weights = request.now_s, request.prompt_tokens, self._weights
        usual_s, usual_least_s = self._usual_s, self._usual_least_s
        stall_weight, switch_margin = weights.stall_weight, weights.switch_margin
        speeds, median, apart = self._speeds(pods)
        overheads_s = [pod.overhead_s for pod in pods]
        for i in apart:
            overheads_s[i] = overheads_s[median]
        # The queue of a pod that counts as fast as its peers was computed with the pod's own speed.
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
                # A prefill much longer than usual outlasts the requests that decode now, so they lose less than own_s.
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
            sharing_s = 0.0
            if in_flight > decoding:
                sharing_s = shared_s
                unbegun_s = step_s - (now_s - pod.sent_s)
                if unbegun_s > 0:
                    costs.uneven_s[i] = EVENNESS * unbegun_s
            step_s *= steps
            stall = stall_weight * decoding
            stall_s = stall * stalled_s
            evict_s = others_s = 0.0
            if regret and (evicted := uncached + request.output_tokens - pod.room_tokens) > 0:
                evict_s = regret * cost.token_s * evicted
            if parting is not None and i not in own:
                others_s = spared_s if last_match == longest_match else parting.unseen_s
            fetch_s = pressure_s = duplicate_s = switch_s = credit_s = 0.0
            if pod.host_tokens or pod.disk_tokens or pod.shared_tokens:
                fetch_s = fetch_or_compute_s(pod, cost, uncached, prompt, weights)
            if pod.adapter_s:
                fetch_s += pod.adapter_s
            if pod.kv_used:
                # A pod without free blocks preempts a request, and then does work of about this size twice. The
                # fuller the pod is, the likelier this is.
                pressure_s = weights.pressure_weight * cost.token_s * prompt * fullness(pod.kv_used)
            if is_further:
                duplicate_s = costs.duplicate_s[i] = own_s - least_s + stall_s - stall * least_stalled_s
                switch_s = costs.switch_s[i] = switch_margin * duplicate_s
                if owed_s:
                    credit_s = min(owed_s, duplicate_s + switch_s)
                    if least_s > usual_least_s:
                        credit_s *= 1 - (least_s - usual_least_s) / own_s
                    costs.credit_s[i] = credit_s
            ttft_s = wait_s + own_s + step_s + fetch_s + overheads_s[i]
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
                        "overhead_s": overheads_s[i],
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


def _follow(mean: float, number: float) -> float:
    """Return the moving mean with one more number; `mean` is infinite before the first."""
    return number if math.isinf(mean) else mean + _FOLLOW * (number - mean)


def _unsure_s(cost: StepCost, decoding: int, context_tokens: int) -> float:
    """Return the seconds by which the running step may end sooner or later than predicted: half of the step."""
    return decode_s(cost, decoding, context_tokens) / 2


def _is_same(numbers: float | Floats, rows: Ints) -> bool:
    return isinstance(numbers, float) or bool((numbers[rows] == numbers[rows[0]]).all())


def _owed_after(costs: Costs, chosen: int, owed_s: float, share: float) -> float:
    """Return the debt after this request. A copy pays it down. It grows by what one more copy, on an average other pod,
    would have saved the request, or by 0 if that pod would have been no better.

    Other gateways' losses are not known here. This gateway's requests are `share` of all, and stand for the rest.
    """
    scores, duplicates_s = costs.scores, costs.duplicate_s
    lacking = [i for i, duplicate_s in enumerate(duplicates_s) if duplicate_s > 0]
    if not lacking:
        return 0.0
    best_s, credits_s, switches_s = scores[chosen], costs.credit_s, costs.switch_s
    if duplicates_s[chosen] > 0:
        best_s = min([score for score, duplicate_s in zip(scores, duplicates_s, strict=True) if duplicate_s <= 0])
        # The request itself pays what it saves by not waiting for a pod that holds a copy.
        owed_s -= min(credits_s[chosen], max(0.0, scores[chosen] + credits_s[chosen] - best_s))
    with_copies_s = [scores[i] + credits_s[i] - switches_s[i] - duplicates_s[i] for i in lacking]
    spared_s = math.fsum([max(0.0, best_s - with_copy_s) for with_copy_s in with_copies_s]) / len(lacking)
    price_s = max([duplicates_s[i] + switches_s[i] for i in lacking])
    return min(owed_s + spared_s / share, price_s)
