"""`prefix_hash`: consistent hashing of the prefix. Best locality, no balance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from router.routing.least_loaded import LeastLoaded
from router.routing.ring import Rings
from router.views.pick import decide
from router.views.table import CandidatePods
from router.views.types import Decision, RequestInfo


class PrefixHash:
    """The ring's owner of the key at `depth_strides`, or of the deepest key of a shorter prompt.

    A prompt without a key shares no prefix: it goes to the least loaded pod.
    """

    name = "prefix_hash"

    def __init__(self, depth_strides: int) -> None:
        self._depth_strides = depth_strides
        self._rings = Rings()
        self._keyless = LeastLoaded()

    def choose(self, request: RequestInfo, pods: CandidatePods, *, explain: bool = False) -> Decision:
        """See `Policy.choose`; scores are places on the ring."""
        if not request.keys:
            return replace(self._keyless.choose(request, pods, explain=explain), policy=self.name)
        successors = self._rings.successors(request.keys[: self._depth_strides][-1], pods)
        if not explain:
            return decide(self.name, pods, next(successors))
        order = list(successors)
        return decide(self.name, pods, order[0], np.argsort(order).astype(np.float64))
