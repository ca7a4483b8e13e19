"""`least_loaded`: fewest prompt tokens still to be prefilled, then fewest requests."""

from __future__ import annotations

from router.views.pick import decide, lowest
from router.views.table import CandidatePods
from router.views.types import Decision, RequestInfo


class LeastLoaded:
    """Ignores prefixes: the baseline a cache-aware policy has to beat."""

    name = "least_loaded"

    def choose(self, request: RequestInfo, pods: CandidatePods, *, explain: bool = False) -> Decision:
        """See `Policy.choose`; scores are loads in tokens."""
        scores = pods.load(request.now_s)
        return decide(self.name, pods, lowest(request, pods, scores), scores if explain else None)
