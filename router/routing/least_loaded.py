"""`least_loaded`: fewest prompt tokens still to be prefilled, then fewest requests."""

from __future__ import annotations

from collections.abc import Sequence

from router.views.pick import decide, load, lowest
from router.views.table import WidePods, WidePolicy
from router.views.types import Decision, PodView, RequestInfo


class LeastLoaded(WidePolicy):
    """Ignores prefixes: the baseline a cache-aware policy has to beat."""

    name = "least_loaded"

    def choose(self, request: RequestInfo, pods: Sequence[PodView], *, explain: bool = False) -> Decision:
        """See `Policy.choose`; scores are loads in tokens."""
        scores = [load(pod) for pod in pods]
        return decide(self.name, pods, lowest(request, pods, scores), scores if explain else ())

    def choose_wide(self, request: RequestInfo, pods: WidePods) -> Decision:
        """See `WidePolicy.choose_wide`."""
        return pods.decision(self.name, pods.lowest(request, pods.load(request.now_s)))
