"""`round_robin`: each pod in turn, by pod id."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from router.views.pick import decide
from router.views.table import WidePods, WidePolicy
from router.views.types import Decision, PodView, RequestInfo


class RoundRobin(WidePolicy):
    """Chooses the pod whose id follows the last chosen one, which need not be among the pods any more."""

    name = "round_robin"

    def __init__(self) -> None:
        self._last = ""

    def choose(self, request: RequestInfo, pods: Sequence[PodView], *, explain: bool = False) -> Decision:
        """See `Policy.choose`; scores are places in the coming order."""
        order = sorted(range(len(pods)), key=lambda i: (pods[i].pod_id <= self._last, pods[i].pod_id))
        if not explain:
            self._last = pods[order[0]].pod_id
            return decide(self.name, pods, order[0])
        scores = [float(order.index(i)) for i in range(len(pods))]
        return decide(self.name, pods, order[0], scores)

    def choose_wide(self, request: RequestInfo, pods: WidePods) -> Decision:
        """See `WidePolicy.choose_wide`."""
        ids = pods.table.ids
        row = bisect_right(ids, self._last) % len(ids)
        self._last = ids[row]
        return pods.decision(self.name, row)
