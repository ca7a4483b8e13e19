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
_EVEN = 1.1
"""Requests of the last minutes that a pod may have, relative to the mean, to be sent what it holds."""
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
    share and changing only when that is `hysteresis` pods away. What recurs below the popular keys (a conversation, a
    system prompt that one pod can serve) stays on the pod that holds it while that is within `bound` times the mean
    load: for a group of one pod, the one where the prefix already is serves best.
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
        members = [i for i, pod in enumerate(pods) if pod.pod_id in group] or list(range(len(pods)))
        scores = [load(pod) + _ELSEWHERE for pod in pods]
        for i in members:
            scores[i] = load(pods[i])
        for i in self._homes(request, depth, pods, members):
            scores[i] -= _ELSEWHERE
        chosen = lowest(request, pods, scores)
        if explain:
            return decide(self.name, pods, chosen, scores)
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

    def _homes(self, request: RequestInfo, depth: int, pods: Sequence[PodView], members: Sequence[int]) -> list[int]:
        """The members with the longest match beyond the popular keys, of those not past the bound."""
        beyond = (depth + 1) * request.prompt_tokens / max(1, len(request.keys))
        holders = [i for i in members if pods[i].matched_tokens >= beyond - 1]
        if not holders:
            return []
        limit = bound_per_weight([pods[i] for i in members], self._bound)
        recent = {i: self._recent.tokens(pods[i].pod_id, request.now_s) / pods[i].weight for i in members}
        even = _EVEN * sum(recent.values()) / len(members) + _SLACK
        free = [i for i in holders if recent[i] <= even and pods[i].in_flight <= limit * pods[i].weight + _SLACK]
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


def _work_s(request: RequestInfo, pods: Sequence[PodView], chosen: int) -> float:
    """Seconds of the pod that the request takes: its prefill, and its part in the steps that decode its answer.

    The fixed part of a step is shared by those that decode in it, on average over the pods.
    """
    pod, cost = pods[chosen], pods[chosen].cost
    uncached = max(0, request.prompt_tokens - pod.matched_tokens)
    together = 1 + sum([view.decoding for view in pods]) / len(pods)
    token_s = cost.base_s / together + cost.sequence_s + cost.context_s * request.prompt_tokens
    return prefill_s(cost, uncached, request.prompt_tokens) + request.output_tokens * token_s
