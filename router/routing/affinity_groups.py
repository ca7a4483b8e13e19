"""`affinity_groups`: each popular prefix owns as many pods as its share of the load needs; rare ones share the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.contract.keys import PrefixKey
from router.routing.latency import prefill_s
from router.routing.pick import bound_per_weight, decide, load, lowest
from router.routing.recent import RecentWork
from router.routing.ring import Rings
from router.routing.shares import Popularity, TrafficShares
from router.routing.types import Decision, PodId, PodView, RequestInfo

_ELSEWHERE = 1e9
"""Tokens; above any load."""
_SLACK = 4
"""Requests beyond the bound that are no imbalance yet: so many come together by chance."""
_EVEN = 1.08
"""Requests of the last minutes that a pod may have had, relative to the mean, to be sent further ones ..."""
_EVEN_AT_HOME = 1.25
"""... and to be sent what it holds: new conversations, not old ones, make up for what those bring."""
_RECENT_HALF_LIFE_S = 60.0
_FIRST_REQUESTS = 100
"""Shares of fewer requests are chance: no groups before."""
_FULL = 1.25
"""Pods' worth of load past which a pod gets no further group while another is free."""


@dataclass(frozen=True, slots=True)
class _Groups:
    """Who serves what, until the next look at the shares."""

    made_at_s: float = float("-inf")
    pods: frozenset[PodId] = frozenset()
    popular: frozenset[PrefixKey] = frozenset()
    owned: dict[PrefixKey, tuple[PodId, ...]] = field(default_factory=dict)
    rest: frozenset[PodId] = frozenset()


class AffinityGroups:
    """Least loaded within the group of the deepest popular prefix of the request that has one.

    A prefix whose own traffic is worth `min_pods` pods owns a group: k successive pods of the ring, k following its
    share and changing only when that is `hysteresis` pods away. Pods are whole and shares are not: what a group's pods
    have had too much of goes to others. What recurs below the popular keys (a conversation, a system prompt that one
    pod can serve) stays on the pod that holds it while that is within `bound` times the mean load: for a group of one
    pod, the one where the prefix already is serves best.
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

    def choose(self, request: RequestInfo, pods: Sequence[PodView], *, explain: bool = False) -> Decision:
        """See `Policy.choose`; scores are loads in tokens; of pods outside the group behind all others, of those
        that hold what recurs before them."""
        groups = self._current(pods, request.now_s)
        group, depth = self._group(groups, request)
        recent = self._recent_requests(pods, request.now_s)
        even = _within(_EVEN, recent, pods)
        scores = [load(pod) + _ELSEWHERE for pod in pods]
        for i in [i for i in even if pods[i].pod_id in group] or _nearest(even, pods):
            scores[i] = load(pods[i])
        for i in self._homes(request, depth, _within(_EVEN_AT_HOME, recent, pods), pods):
            scores[i] = load(pods[i]) - _ELSEWHERE
        chosen = lowest(request, pods, scores)
        if explain:
            return decide(self.name, pods, chosen, scores)
        if groups is not self._groups:
            self._count_joined(pods, recent, request.now_s)
            self._groups = groups
        self._seen += 1
        self._recent.add(pods[chosen].pod_id, 1.0, request.now_s)
        self.shares.record(request.keys, _work_s(request, pods, chosen), request.now_s)
        return decide(self.name, pods, chosen)

    def _group(self, groups: _Groups, request: RequestInfo) -> tuple[Sequence[PodId] | frozenset[PodId], int]:
        """The pods for the request, and how many of its keys are popular."""
        group: Sequence[PodId] | frozenset[PodId] = groups.rest
        for depth, key in enumerate(request.keys):
            if key not in groups.popular:
                return group, depth
            group = groups.owned.get(key, group)
        return group, len(request.keys)

    def _recent_requests(self, pods: Sequence[PodView], now_s: float) -> list[float]:
        """Requests of the last minutes. A pod that has just joined, or come back, counts as served like the others:
        else it would get every new prefix until it had caught up."""
        there = [pod for pod in pods if pod.pod_id in self._groups.pods]
        sent = {pod.pod_id: self._recent.tokens(pod.pod_id, now_s) for pod in there}
        share = sum(sent.values()) / sum([pod.weight for pod in there]) if there else 0.0
        return [sent.get(pod.pod_id, share * pod.weight) for pod in pods]

    def _count_joined(self, pods: Sequence[PodView], recent: Sequence[float], now_s: float) -> None:
        """Keep what `_recent_requests` says of pods that were not there."""
        for pod, count in zip(pods, recent, strict=True):
            if pod.pod_id not in self._groups.pods:
                self._recent.add(pod.pod_id, count - self._recent.tokens(pod.pod_id, now_s), now_s)

    def _homes(self, request: RequestInfo, depth: int, even: Sequence[int], pods: Sequence[PodView]) -> list[int]:
        """Of the pods `even`, those with the longest match beyond the popular keys, unless too busy; in the group or
        not, as groups change while a conversation lasts."""
        beyond = (depth + 1) * request.prompt_tokens / max(1, len(request.keys))
        holders = [i for i in even if pods[i].matched_tokens >= beyond - 1]
        if not holders:
            return []
        limit = bound_per_weight(pods, self._bound)
        free = [i for i in holders if pods[i].in_flight <= limit * pods[i].weight + _SLACK]
        longest = max([pods[i].matched_tokens for i in free], default=0)
        return [i for i in free if pods[i].matched_tokens == longest]

    def _current(self, pods: Sequence[PodView], now_s: float) -> _Groups:
        """The groups in force, made anew when old or when a pod is new; a pod left out for one retry is no reason."""
        ids = frozenset(pod.pod_id for pod in pods)
        groups = self._groups
        if now_s - groups.made_at_s < self._refresh_s and ids <= groups.pods:
            return groups
        popular = self.shares.popular(self._min_pods / len(pods), now_s) if self._seen >= _FIRST_REQUESTS else {}
        owned: dict[PrefixKey, tuple[PodId, ...]] = {}
        worth: defaultdict[PodId, float] = defaultdict(float)
        wanted = self._sizes(popular, len(pods))
        for key in sorted(wanted, key=lambda key: (-wanted[key], key)):
            own_pods = popular[key].own * len(pods)
            owned[key] = self._place(key, pods, wanted[key], worth, own_pods / wanted[key])
        unowned = 1 - sum(popular[key].own for key in owned)
        count = max(1, round(unowned * len(pods)))
        rest = frozenset(sorted(ids, key=lambda pod_id: (worth[pod_id], pod_id))[:count])
        return _Groups(now_s, ids, frozenset(popular), owned, rest)

    def _sizes(self, popular: dict[PrefixKey, Popularity], pods: int) -> dict[PrefixKey, int]:
        """Pods for each prefix with enough traffic of its own."""
        sizes = {}
        for key, popularity in popular.items():
            exact = popularity.own * pods
            if exact >= self._min_pods:
                now = len(self._groups.owned.get(key, ()))
                keeps = now and abs(exact - now) <= self._hysteresis
                sizes[key] = min(pods, now if keeps else max(1, round(exact)))
        return sizes

    def _place(
        self, key: PrefixKey, pods: Sequence[PodView], count: int, worth: defaultdict[PodId, float], each: float
    ) -> tuple[PodId, ...]:
        """`count` pods in ring order from the key, those with room for `each` pods' worth of load first."""
        ring = list(self._rings.successors(key, pods))
        group = sorted(ring, key=lambda pod_id: worth[pod_id] + each > _FULL)[:count]
        for pod_id in group:
            worth[pod_id] += each
        return tuple(group)


def _within(bound: float, recent: Sequence[float], pods: Sequence[PodView]) -> list[int]:
    """The pods with no more than `bound` times their share of the recent requests."""
    limit = bound * sum(recent) / sum([pod.weight for pod in pods])
    return [i for i, pod in enumerate(pods) if recent[i] <= limit * pod.weight + _SLACK]


def _nearest(even: Sequence[int], pods: Sequence[PodView]) -> list[int]:
    """Where a group's requests go when all of its pods have had too many: those that hold most of the prefix."""
    longest = max([pods[i].matched_tokens for i in even])
    return [i for i in even if pods[i].matched_tokens == longest]


def _work_s(request: RequestInfo, pods: Sequence[PodView], chosen: int) -> float:
    """Seconds of the pod that the request takes: its prefill, and its part in the steps that decode its answer.

    The fixed part of a step is shared by those that decode in it, on average over the pods.
    """
    pod, cost = pods[chosen], pods[chosen].cost
    uncached = max(0, request.prompt_tokens - pod.matched_tokens)
    together = 1 + sum([view.decoding for view in pods]) / len(pods)
    token_s = cost.base_s / together + cost.sequence_s + cost.context_s * request.prompt_tokens
    return prefill_s(cost, uncached, request.prompt_tokens) + request.output_tokens * token_s
