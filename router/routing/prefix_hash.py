"""`prefix_hash`: consistent hashing of the prefix. Best locality, no balance."""

from __future__ import annotations

from collections.abc import Sequence

from router.routing.least_loaded import LeastLoaded
from router.routing.ring import Rings, position
from router.views.pick import decide
from router.views.table import WidePods, WidePolicy
from router.views.types import Decision, PodView, RequestInfo


class PrefixHash(WidePolicy):
    """The ring's owner of the key at `depth_strides`, or of the deepest key of a shorter prompt.

    A prompt without a key shares no prefix: it goes to the least loaded pod.
    """

    name = "prefix_hash"

    def __init__(self, depth_strides: int) -> None:
        self._depth_strides = depth_strides
        self._rings = Rings()
        self._keyless = LeastLoaded()

    def choose(self, request: RequestInfo, pods: Sequence[PodView], *, explain: bool = False) -> Decision:
        """See `Policy.choose`; scores are places on the ring."""
        if not request.keys:
            decision = self._keyless.choose(request, pods, explain=explain)
            return decide(self.name, pods, decision.pod, [score.score for score in decision.scores])
        key = request.keys[: self._depth_strides][-1]
        if not explain:
            return decide(self.name, pods, position(pods, self._rings.owner(key, pods)))
        order = list(self._rings.successors(key, pods))
        scores = [float(order.index(pod.pod_id)) for pod in pods]
        return decide(self.name, pods, scores.index(0.0), scores)

    def choose_wide(self, request: RequestInfo, pods: WidePods) -> Decision:
        """See `WidePolicy.choose_wide`."""
        if not request.keys:
            return pods.decision(self.name, self._keyless.choose_wide(request, pods).pod)
        key = request.keys[: self._depth_strides][-1]
        return pods.decision(self.name, next(self._rings.successors_wide(key, pods)))
