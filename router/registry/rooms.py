"""Tokens that each pod's cache takes before it evicts something, kept current where the estimates change."""

from __future__ import annotations

import math
from collections.abc import Callable

from router.routing.types import PodId

OnRoom = Callable[[PodId, float], None]
"""Told of a pod, and of the tokens that it has room for."""


class Rooms:
    """What decisions read, so that none of them asks each pod's estimate anew."""

    def __init__(self) -> None:
        self._tokens: dict[PodId, float] = {}
        """Of the pods whose room is known."""
        self._watchers: tuple[OnRoom, ...] = ()

    def of(self, pod: PodId) -> float:
        """Tokens that the pod can take before it evicts something; infinite where that is not known."""
        return self._tokens.get(pod, math.inf)

    def set(self, pod: PodId, tokens: float) -> None:
        """The pod has room for so many tokens now; infinite: that is not known any more."""
        if tokens == self._tokens.get(pod, math.inf):
            return
        if tokens == math.inf:
            del self._tokens[pod]
        else:
            self._tokens[pod] = tokens
        for watcher in self._watchers:
            watcher(pod, tokens)

    def watch(self, watcher: OnRoom) -> None:
        """Tell `watcher` of each pod whose room is known, and from now on of each change."""
        self._watchers = (*self._watchers, watcher)
        for pod, tokens in self._tokens.items():
            watcher(pod, tokens)

    def unwatch(self, watcher: OnRoom) -> None:
        """End that."""
        self._watchers = tuple(other for other in self._watchers if other != watcher)
