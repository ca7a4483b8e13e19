"""`affinity_groups`: each popular prefix owns as many pods as its share of the load needs; rare ones share the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
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
from router.views.pick import decide, lowest, requests_per_weight
from router.views.table import CandidatePods, Floats, PodTable
from router.views.types import Decision, PodId, RequestInfo

Group = Sequence[PodId] | frozenset[PodId]

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


class AffinityGroups:
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

    def choose(self, request: RequestInfo, pods: CandidatePods, *, explain: bool = False) -> Decision:
        """See `Policy.choose`. Scores are loads in tokens. Pods outside the group score behind all others. Pods that
        hold recurring text, and pods that take turns, score before all others."""
        table, now_s = pods.table, request.now_s
        groups = self._current(pods, now_s)
        group, depth = self._group(groups, request)
        recent = self._recent_requests(table, pods.columns.weight, now_s)
        common = self._run.common(request)
        scores = self._scores(request, pods, group, depth, recent, common)
        chosen = lowest(request, pods, scores)
        if explain:
            return decide(self.name, pods, chosen, scores)
        if groups is not self._groups:
            self._count_joined(table.ids, recent.tolist(), now_s)
            self._groups = groups
        decoding = float(pods.columns.decoding.sum()) / len(table)
        overhead_s = float(pods.columns.overhead_s[chosen])
        work_s = _work_s(request, table.costs[chosen], overhead_s, pods.matched_by(chosen), decoding)
        self._remember(request, table.ids[chosen], work_s, common)
        return decide(self.name, pods, chosen)

    def _scores(
        self, request: RequestInfo, pods: CandidatePods, group: Group, depth: int, recent: Floats, common: int
    ) -> Floats:
        """Return each pod's score. `depth`: popular keys of the request. `recent`: each pod's requests in the last
        minutes. `common`: keys in common with the requests before."""
        table, columns = pods.table, pods.columns
        matched = np.zeros(len(table)) if pods.matched is None else pods.matched
        loads = pods.load(request.now_s)
        share = columns.weight * (sum(recent.tolist()) / sum(columns.weight.tolist()))
        is_even = recent <= _EVEN * share + _SLACK
        is_candidate = is_even & _is_candidate(request, table, matched, pods.longest, group, depth)
        if not is_candidate.any():  # the pods that hold most of the prefix, if a group's pods have all had too many
            is_candidate = is_even & (matched == matched[is_even].max())
        scores = loads + _ELSEWHERE
        scores[is_candidate] = loads[is_candidate]
        is_free = columns.in_flight <= requests_per_weight(pods, self._bound) * columns.weight + _SLACK
        queued = 0.0
        if self._run.is_pair(common):
            queued = float(pods.uncached(request.now_s)[matched == pods.longest].min())
        if self._takes_turns(request, common, pods.longest, queued, depth, len(group), len(table)):
            is_free &= is_even
            scores[is_free] = self._turns.lasts(table.ids)[is_free] - _ELSEWHERE
        else:
            # Pods with the longest match beyond the popular keys that are not too busy. They may be outside the group,
            # because groups change while a conversation lasts.
            is_home = is_free & (recent <= _EVEN_AT_HOME * share + _SLACK) & (matched >= _beyond(request, depth) - 1)
            is_home &= matched == matched[is_home].max(initial=0.0)
            scores[is_home] = loads[is_home] - _ELSEWHERE
        return scores

    def _recent_requests(self, table: PodTable, weights: Floats, now_s: float) -> Floats:
        """Return each pod's number of requests in the last minutes. A pod that has just joined or come back counts with
        the mean of the others: otherwise it would get every new prefix until it had caught up."""
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

    def _group(self, groups: _Groups, request: RequestInfo) -> tuple[Group, int]:
        """Return the pods for the request, and how many of its keys are popular."""
        group: Group = groups.rest
        for depth, key in enumerate(request.keys):
            if key not in groups.popular:
                return group, depth
            group = groups.owned.get(key, group)
        return group, len(request.keys)

    def _count_joined(self, ids: Sequence[PodId], recent: Sequence[float], now_s: float) -> None:
        """Store the numbers that `_recent_requests` assumed for pods that have just joined."""
        for pod_id, count in zip(ids, recent, strict=True):
            if pod_id not in self._groups.pods:
                self._recent.add(pod_id, count - self._recent.tokens(pod_id, now_s), now_s)

    def _current(self, pods: CandidatePods, now_s: float) -> _Groups:
        """Return the current groups, rebuilt if they are old or a pod is new, but not if a retry leaves a pod out."""
        groups, ids = self._groups, pods.table.id_set
        if now_s - groups.made_at_s < self._refresh_s and (ids is groups.pods or ids <= groups.pods):
            return groups
        popular = self.shares.popular(self._min_pods / len(ids), now_s) if self._seen >= _FIRST_REQUESTS else {}
        owned: dict[PrefixKey, tuple[PodId, ...]] = {}
        worth: defaultdict[PodId, float] = defaultdict(float)
        wanted = self._sizes(popular, len(ids))
        for key in sorted(wanted, key=lambda key: (-wanted[key], key)):
            own_pods = popular[key].own * len(ids)
            ring = [pods.table.ids[row] for row in self._rings.successors(key, pods)]
            owned[key] = _place(ring, wanted[key], worth, own_pods / wanted[key])
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
    group: Group,
    depth: int,
) -> NDArray[np.bool_]:
    """Return every pod if neither the popular keys nor any pod's match make up half of the prompt. Otherwise return the
    group. If both the popular keys and the longest match make up half, the pods with that match are added."""
    popular = depth * request.prompt_tokens / max(1, len(request.keys))
    least = _NEAR * request.prompt_tokens
    if max(longest, popular) < least:
        return np.ones(len(table), dtype=np.bool_)
    is_candidate = np.zeros(len(table), dtype=np.bool_)
    is_candidate[table.rows(group)] = True
    if popular >= least and longest >= least:
        is_candidate |= matched == longest
    return is_candidate


def _work_s(request: RequestInfo, cost: StepCost, overhead_s: float, matched_tokens: int, decoding: float) -> float:
    """Return how many seconds of the pod's time the request takes: its prefill, and its part in the steps that decode
    its answer.

    The requests that decode in a step share its fixed part; `decoding`: the mean number of them on a pod. If the pod
    does not report that part, the fixed part of a request stands for it.
    """
    uncached = max(0, request.prompt_tokens - matched_tokens)
    token_s = (cost.base_s + overhead_s) / (1 + decoding) + cost.sequence_s + cost.context_s * request.prompt_tokens
    return prefill_s(cost, uncached, request.prompt_tokens) + request.output_tokens * token_s
