"""`bounded_hash`: consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, arXiv 1608.01350)."""

from __future__ import annotations

from collections.abc import Sequence

from router.routing.least_loaded import LeastLoaded
from router.routing.ring import Rings, position
from router.views.pick import bound_per_weight, decide
from router.views.table import WidePods, WidePolicy
from router.views.types import Decision, PodView, RequestInfo


class BoundedHash(WidePolicy):
    """As `prefix_hash`, but takes the first pod on the ring with at most `bound` times its share of requests in flight.

    Shares are by weight and count the new request, so some pod always qualifies.
    """

    name = "bounded_hash"

    def __init__(self, depth_strides: int, bound: float) -> None:
        self._depth_strides = depth_strides
        self._bound = bound
        self._rings = Rings()
        self._keyless = LeastLoaded()

    def choose(self, request: RequestInfo, pods: Sequence[PodView], *, explain: bool = False) -> Decision:
        """See `Policy.choose`. Scores are places on the ring; pods past the bound score behind all others."""
        if not request.keys:
            decision = self._keyless.choose(request, pods, explain=explain)
            return decide(self.name, pods, decision.pod, [score.score for score in decision.scores])
        key = request.keys[: self._depth_strides][-1]
        limit = bound_per_weight(pods, self._bound)
        if not explain:
            fits = {pod.pod_id for pod in pods if pod.in_flight <= limit * pod.weight}
            owner = next(pod_id for pod_id in self._rings.successors(key, pods) if pod_id in fits)
            return decide(self.name, pods, position(pods, owner))
        order = list(self._rings.successors(key, pods))
        places = [float(order.index(pod.pod_id)) for pod in pods]
        over = [0.0 if pod.in_flight <= limit * pod.weight else float(len(pods)) for pod in pods]
        parts = [{"place": place, "over_bound": extra} for place, extra in zip(places, over, strict=True)]
        scores = [place + extra for place, extra in zip(places, over, strict=True)]
        return decide(self.name, pods, scores.index(min(scores)), scores, parts)

    def choose_wide(self, request: RequestInfo, pods: WidePods) -> Decision:
        """See `WidePolicy.choose_wide`."""
        if not request.keys:
            return pods.decision(self.name, self._keyless.choose_wide(request, pods).pod)
        key = request.keys[: self._depth_strides][-1]
        in_flight, weight = pods.columns.in_flight, pods.columns.weight
        limit = self._bound * (float(in_flight.sum()) + 1) / sum(weight.tolist())
        fits = in_flight <= limit * weight
        return pods.decision(self.name, next(row for row in self._rings.successors_wide(key, pods) if fits[row]))
