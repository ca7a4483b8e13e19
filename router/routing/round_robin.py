"""`round_robin`: each pod in turn, by pod id."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from router.views.pick import decide
from router.views.table import CandidatePods
from router.views.types import Decision, RequestInfo


class RoundRobin:
    """Chooses the pod whose id follows the last chosen one, which need not be among the pods any more."""

    name = "round_robin"

    def __init__(self) -> None:
        self._last = ""

    def choose(self, request: RequestInfo, pods: CandidatePods, *, explain: bool = False) -> Decision:
        """See `Policy.choose`; scores are places in the coming order."""
        ids = pods.table.ids
        row = bisect_right(ids, self._last) % len(ids)
        if explain:
            return decide(self.name, pods, row, (np.arange(len(ids), dtype=np.float64) - row) % len(ids))
        self._last = ids[row]
        return decide(self.name, pods, row)
