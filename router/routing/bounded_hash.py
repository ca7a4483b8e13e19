"""`bounded_hash`: consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, arXiv 1608.01350)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from router.routing.least_loaded import LeastLoaded
from router.routing.ring import Rings
from router.views.pick import decide, requests_per_weight
from router.views.table import CandidatePods
from router.views.types import Decision, RequestInfo


class BoundedHash:
    """As `prefix_hash`, but takes the first pod on the ring with at most `bound` times its share of requests in flight.

    Shares are by weight and count the new request, so some pod always qualifies.
    """

    name = "bounded_hash"

    def __init__(self, depth_strides: int, bound: float) -> None:
        self._depth_strides = depth_strides
        self._bound = bound
        self._rings = Rings()
        self._keyless = LeastLoaded()

    def choose(self, request: RequestInfo, pods: CandidatePods, *, explain: bool = False) -> Decision:
        """See `Policy.choose`. Scores are places on the ring; pods past the bound score behind all others."""
        if not request.keys:
            return replace(self._keyless.choose(request, pods, explain=explain), policy=self.name)
        columns = pods.columns
        fits = columns.in_flight <= requests_per_weight(pods, self._bound) * columns.weight
        successors = self._rings.successors(request.keys[: self._depth_strides][-1], pods)
        if not explain:
            return decide(self.name, pods, next(row for row in successors if fits[row]))
        place = np.argsort(list(successors)).astype(np.float64)
        over_bound = np.where(fits, 0.0, float(len(fits)))
        scores = place + over_bound
        return decide(self.name, pods, int(scores.argmin()), scores, {"place": place, "over_bound": over_bound})
