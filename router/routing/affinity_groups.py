"""`affinity_groups`: each popular prefix owns as many pods as its share of the load needs; rare ones share the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.contract.keys import PrefixKey
from engine.contract.load import StepCost
from router.routing.recent import RecentWork, Turns
from router.routing.ring import Rings
from router.routing.run import Run
from router.routing.shares import Popularity, TrafficShares
from router.views.latency import prefill_s
from router.views.pick import bound_per_weight, decide, load, lowest
from router.views.table import Floats, PodTable, WidePods, WidePolicy
from router.views.types import Decision, PodId, PodView, RequestInfo

_ELSEWHERE = 1e9
"""A number of tokens above any load: added to a pod's score, it moves the pod behind all others."""
_SLACK = 4
"""A pod may have this many requests more than the bound, because so many arrive at once by chance."""
_EVEN = 1.08
"""A pod with more than this many times the mean requests of the last minutes gets no new prefix ..."""
_EVEN_AT_HOME = 1.25
"""... and with more than this, no request whose prefix it holds, either. Placing new conversations elsewhere usually
evens out the load of the old ones."""
_RECENT_HALF_LIFE_S = 60.0
_FIRST_REQUESTS = 20
"""There are no groups before this many requests: shares of fewer requests are chance."""
_NEAR = 0.5
"""Pods that hold at least this share of a prompt are worth waiting for."""
_FULL = 1.25
"""If a further group would bring a pod above this many pods' worth of load, other pods come first for the group."""


@dataclass(frozen=True, slots=True)
class _Groups:
    """Which pods serve which prefixes, until the shares are read again."""

    made_at_s: float = float("-inf")
    pods: frozenset[PodId] = frozenset()
    popular: frozenset[PrefixKey] = frozenset()
    owned: dict[PrefixKey, tuple[PodId, ...]] = field(default_factory=dict)
    rest: frozenset[PodId] = frozenset()


class AffinityGroups(WidePolicy):
    """Finds the request's deepest popular prefix that has a group, and chooses the least loaded pod of that group.

    A prefix whose own traffic is worth `min_pods` pods owns a group: k successive pods of the ring. k follows the
    prefix's share, but changes only if it is off by more than `hysteresis` pods. A group has a whole number of pods,
    which never fits its share exactly, so excess requests of a group go to other pods. Text that recurs behind the
    popular keys (a conversation, a system prompt that one pod can serve) stays on the pod that holds it while that pod
    is within `bound` times the mean load: such text needs one pod, and the pod that already holds it serves best.

    Shares lag behind traffic. If more prompts in a row share one prefix than the size of its group explains, and no
    pod holds more of the prompt than this prefix, all pods take turns: then all that can be gained is an even spread.
    Two prompts in a row are enough if every pod that holds the prefix has more prefill queued than its cache would
    save.
    """

    name = "affinity_groups"

    def __init__(
        self, shares: TrafficShares, *, min_pods: float, hysteresis: float, refresh_s: float, bound: float
    ) -> None:
        self.shares = shares
        self._min_pods = min_pods
        self._hysteresis = hysteresis
        self._refresh_s = refresh_s
        self._bound = bound
        self._rings = Rings()
        self._groups = _Groups()
        self._seen = 0
        self._recent = RecentWork(_RECENT_HALF_LIFE_S)
        self._run = Run()
        self._turns = Turns()

    def choose(self, request: RequestInfo, pods: Sequence[PodView], *, explain: bool = False) -> Decision:
        """See `Policy.choose`. Scores are loads in tokens. Pods outside the group score behind all others. Pods that
        hold recurring text, and pods that take turns, score before all others."""
        ids = frozenset(pod.pod_id for pod in pods)
        groups = self._current(ids, lambda key: list(self._rings.successors(key, pods)), request.now_s)
        group, depth = self._group(groups, request)
        recent = self._recent_requests(pods, request.now_s)
        even = _within(_EVEN, recent, pods)
        scores = [load(pod) + _ELSEWHERE for pod in pods]
        longest = max([pod.matched_tokens for pod in pods])
        nearby = _candidates(request, pods, longest, group, depth)
        for i in [i for i in even if pods[i].pod_id in nearby] or _nearest(even, pods):
            scores[i] = load(pods[i])
        common = self._run.common(request)
        queued = 0.0
        if self._run.is_pair(common):
            queued = min([pod.in_flight_uncached_tokens for pod in pods if pod.matched_tokens == longest])
        if self._takes_turns(request, common, longest, queued, depth, len(group), len(pods)):
            limit = bound_per_weight(pods, self._bound)
            for i in even:
                if pods[i].in_flight <= limit * pods[i].weight + _SLACK:
                    scores[i] = self._turns.last(pods[i].pod_id) - _ELSEWHERE
        else:
            for i in self._homes(request, depth, _within(_EVEN_AT_HOME, recent, pods), pods):
                scores[i] = load(pods[i]) - _ELSEWHERE
        chosen = lowest(request, pods, scores)
        if explain:
            return decide(self.name, pods, chosen, scores)
        if groups is not self._groups:
            self._count_joined([pod.pod_id for pod in pods], recent, request.now_s)
            self._groups = groups
        pod, decoding = pods[chosen], sum([view.decoding for view in pods]) / len(pods)
        work_s = _work_s(request, pod.cost, pod.overhead_s, pod.matched_tokens, decoding)
        self._remember(request, pod.pod_id, work_s, common)
        return decide(self.name, pods, chosen)

    def choose_wide(self, request: RequestInfo, pods: WidePods) -> Decision:
        """See `WidePolicy.choose_wide`; the steps are those of `choose`."""
        table, columns, now_s = pods.table, pods.columns, request.now_s
        ids, weights = table.ids, columns.weight.tolist()
        matched = np.zeros(len(table)) if pods.matched is None else pods.matched
        groups = self._current(
            table.id_set, lambda key: [ids[row] for row in self._rings.successors_wide(key, pods)], now_s
        )
        group, depth = self._group(groups, request)
        recent = self._recent_wide(table, columns.weight, now_s)
        sent = sum(recent.tolist())
        is_even = recent <= _EVEN * sent / sum(weights) * columns.weight + _SLACK
        loads = pods.load(now_s)
        is_candidate = is_even & _is_candidate(request, table, matched, pods.longest, group, depth)
        if not is_candidate.any():
            is_candidate = is_even & (matched == matched[is_even].max())
        scores = loads + _ELSEWHERE
        scores[is_candidate] = loads[is_candidate]
        limit = self._bound * (float(columns.in_flight.sum()) + 1) / sum(weights)
        is_free = columns.in_flight <= limit * columns.weight + _SLACK
        common = self._run.common(request)
        queued = float(pods.uncached(now_s)[matched == pods.longest].min()) if self._run.is_pair(common) else 0.0
        if self._takes_turns(request, common, pods.longest, queued, depth, len(group), len(table)):
            is_free &= is_even
            scores[is_free] = self._turns.lasts(ids)[is_free] - _ELSEWHERE
        else:
            is_home = recent <= _EVEN_AT_HOME * sent / sum(weights) * columns.weight + _SLACK
            is_home &= matched >= _beyond(request, depth) - 1
            is_home &= is_free
            is_home &= matched == matched[is_home].max(initial=0.0)
            scores[is_home] = loads[is_home] - _ELSEWHERE
        chosen = pods.lowest(request, scores)
        if groups is not self._groups:
            self._count_joined(ids, recent.tolist(), now_s)
            self._groups = groups
        decoding = float(columns.decoding.sum()) / len(table)
        overhead_s = float(pods.columns.overhead_s[chosen])
        work_s = _work_s(request, table.costs[chosen], overhead_s, pods.matched_by(chosen), decoding)
        self._remember(request, ids[chosen], work_s, common)
        return pods.decision(self.name, chosen)

    def _recent_wide(self, table: PodTable, weights: Floats, now_s: float) -> Floats:
        """As `_recent_requests`."""
        recent = self._recent.all_tokens(table.ids, now_s)
        if self._groups.pods is table.id_set:
            return recent
        is_there = np.array([pod_id in self._groups.pods for pod_id in table.ids])
        there = weights[is_there].tolist()
        share = sum(recent[is_there].tolist()) / sum(there) if there else 0.0
        joined: Floats = np.where(is_there, recent, share * weights)
        return joined

    def _takes_turns(
        self, request: RequestInfo, common: int, longest_match: int, queued: float, depth: int, group: int, pods: int
    ) -> bool:
        """Whether all pods take turns.

        They do if all requests now share the prefix of `common` keys. They also do if the request is the second with
        its prefix, and each pod that holds the prefix has more tokens queued for prefill than the cache would save.
        They never do if a pod holds more of the prompt than the first `common` keys.

        `queued`: the fewest tokens queued on a pod that holds the prefix; 0 if the request is not such a second one.
        `group`: number of pods that the request's `depth` popular keys own. The number counts only if these keys make
        up half of the prompt.
        """
        if longest_match >= _beyond(request, common) - 1:
            return False
        if queued > longest_match:
            return True
        share = group / pods if depth >= _NEAR * len(request.keys) else self._min_pods / pods
        return self._run.is_all(common, share)

    def _remember(self, request: RequestInfo, pod_id: PodId, work_s: float, common: int) -> None:
        """Note that the request goes to the pod and takes `work_s` seconds of its time. `common`: see `Run`."""
        self._seen += 1
        self._run.add(request, common)
        self._turns.take(pod_id)
        self._recent.add(pod_id, 1.0, request.now_s)
        self.shares.record(request.keys, work_s, request.now_s)

    def _group(self, groups: _Groups, request: RequestInfo) -> tuple[Sequence[PodId] | frozenset[PodId], int]:
        """Return the pods for the request, and how many of its keys are popular."""
        group: Sequence[PodId] | frozenset[PodId] = groups.rest
        for depth, key in enumerate(request.keys):
            if key not in groups.popular:
                return group, depth
            group = groups.owned.get(key, group)
        return group, len(request.keys)

    def _recent_requests(self, pods: Sequence[PodView], now_s: float) -> list[float]:
        """Return each pod's number of requests in the last minutes. A pod that has just joined or come back counts with
        the mean of the others: otherwise it would get every new prefix until it had caught up."""
        there = [pod for pod in pods if pod.pod_id in self._groups.pods]
        sent = {pod.pod_id: self._recent.tokens(pod.pod_id, now_s) for pod in there}
        share = sum(sent.values()) / sum([pod.weight for pod in there]) if there else 0.0
        return [sent.get(pod.pod_id, share * pod.weight) for pod in pods]

    def _count_joined(self, ids: Sequence[PodId], recent: Sequence[float], now_s: float) -> None:
        """Store the numbers that `_recent_requests` assumed for pods that have just joined."""
        for pod_id, count in zip(ids, recent, strict=True):
            if pod_id not in self._groups.pods:
                self._recent.add(pod_id, count - self._recent.tokens(pod_id, now_s), now_s)

    def _homes(self, request: RequestInfo, depth: int, even: Sequence[int], pods: Sequence[PodView]) -> list[int]:
        """Return those of the pods `even` that have the longest match beyond the popular keys and are not too busy.
        They may be outside the group, because groups change while a conversation lasts."""
        holders = [i for i in even if pods[i].matched_tokens >= _beyond(request, depth) - 1]
        if not holders:
            return []
        limit = bound_per_weight(pods, self._bound)
        free = [i for i in holders if pods[i].in_flight <= limit * pods[i].weight + _SLACK]
        longest = max([pods[i].matched_tokens for i in free], default=0)
        return [i for i in free if pods[i].matched_tokens == longest]

    def _current(self, ids: frozenset[PodId], ring: _RingOrder, now_s: float) -> _Groups:
        """Return the current groups, rebuilt if they are old or a pod is new, but not if a retry leaves a pod out."""
        groups = self._groups
        if now_s - groups.made_at_s < self._refresh_s and (ids is groups.pods or ids <= groups.pods):
            return groups
        popular = self.shares.popular(self._min_pods / len(ids), now_s) if self._seen >= _FIRST_REQUESTS else {}
        owned: dict[PrefixKey, tuple[PodId, ...]] = {}
        worth: defaultdict[PodId, float] = defaultdict(float)
        wanted = self._sizes(popular, len(ids))
        for key in sorted(wanted, key=lambda key: (-wanted[key], key)):
            own_pods = popular[key].own * len(ids)
            owned[key] = _place(ring(key), wanted[key], worth, own_pods / wanted[key])
        unowned = 1 - sum(popular[key].own for key in owned)
        count = max(1, round(unowned * len(ids)))
        rest = frozenset(sorted(ids, key=lambda pod_id: (worth[pod_id], pod_id))[:count])
        return _Groups(now_s, ids, frozenset(popular), owned, rest)

    def _sizes(self, popular: dict[PrefixKey, Popularity], pods: int) -> dict[PrefixKey, int]:
        """Return the number of pods for each prefix with enough traffic of its own."""
        sizes = {}
        for key, popularity in popular.items():
            exact = popularity.own * pods
            if exact >= self._min_pods:
                now = len(self._groups.owned.get(key, ()))
                keeps = now and abs(exact - now) <= self._hysteresis
                sizes[key] = min(pods, now if keeps else max(1, round(exact)))
        return sizes


_RingOrder = Callable[[PrefixKey], list[PodId]]
"""All pods in ring order from a key."""


def _place(ring: list[PodId], count: int, worth: defaultdict[PodId, float], each: float) -> tuple[PodId, ...]:
    """Return `count` pods in the order of `ring`; pods with room for `each` pods' worth of load come first."""
    group = sorted(ring, key=lambda pod_id: worth[pod_id] + each > _FULL)[:count]
    for pod_id in group:
        worth[pod_id] += each
    return tuple(group)


def _beyond(request: RequestInfo, depth: int) -> float:
    """Return the prompt tokens up to one key beyond the popular ones."""
    return (depth + 1) * request.prompt_tokens / max(1, len(request.keys))


def _is_candidate(
    request: RequestInfo,
    table: PodTable,
    matched: Floats,
    longest: int,
    group: Sequence[PodId] | frozenset[PodId],
    depth: int,
) -> NDArray[np.bool_]:
    """As `_candidates`."""
    popular = depth * request.prompt_tokens / max(1, len(request.keys))
    least = _NEAR * request.prompt_tokens
    if max(longest, popular) < least:
        return np.ones(len(table), dtype=np.bool_)
    is_candidate = np.zeros(len(table), dtype=np.bool_)
    is_candidate[table.rows(group)] = True
    if popular >= least and longest >= least:
        is_candidate |= matched == longest
    return is_candidate


def _candidates(
    request: RequestInfo,
    pods: Sequence[PodView],
    longest: int,
    group: Sequence[PodId] | frozenset[PodId],
    depth: int,
) -> Sequence[PodId] | frozenset[PodId]:
    """Return every pod if neither the popular keys nor any pod's match make up half of the prompt. Otherwise return the
    group. If both the popular keys and the longest match make up half, the pods with that match are added."""
    popular = depth * request.prompt_tokens / max(1, len(request.keys))
    least = _NEAR * request.prompt_tokens
    if max(longest, popular) < least:
        return frozenset(pod.pod_id for pod in pods)
    if popular < least or longest < least:
        return group
    return frozenset((*group, *(pod.pod_id for pod in pods if pod.matched_tokens == longest)))


def _within(bound: float, recent: Sequence[float], pods: Sequence[PodView]) -> list[int]:
    """Return the pods with at most `bound` times their share of the recent requests."""
    limit = bound * sum(recent) / sum([pod.weight for pod in pods])
    return [i for i, pod in enumerate(pods) if recent[i] <= limit * pod.weight + _SLACK]


def _nearest(even: Sequence[int], pods: Sequence[PodView]) -> list[int]:
    """Return the pods that hold the most of the prefix: they take requests if a group's pods have all had too many."""
    longest = max([pods[i].matched_tokens for i in even])
    return [i for i in even if pods[i].matched_tokens == longest]


def _work_s(request: RequestInfo, cost: StepCost, overhead_s: float, matched_tokens: int, decoding: float) -> float:
    """Return how many seconds of the pod's time the request takes: its prefill, and its part in the steps that decode
    its answer.

    The requests that decode in a step share its fixed part; `decoding`: the mean number of them on a pod. If the pod
    does not report that part, the fixed part of a request stands for it.
    """
    uncached = max(0, request.prompt_tokens - matched_tokens)
    token_s = (cost.base_s + overhead_s) / (1 + decoding) + cost.sequence_s + cost.context_s * request.prompt_tokens
    return prefill_s(cost, uncached, request.prompt_tokens) + request.output_tokens * token_s
