"""Tokens that each pod's cache takes before it evicts something, updated when the estimates change."""

from __future__ import annotations

import math
from collections.abc import Callable

from router.views.types import PodId

OnRoom = Callable[[PodId, float], None]
"""Called with a pod and the tokens that it has room for."""


class Rooms:
    """The room of each pod. Decisions read it here, so that none of them has to ask for each pod's estimate."""

    def __init__(self) -> None:
        self._tokens: dict[PodId, float] = {}
        """Pods whose room is known -> tokens."""
        self._watchers: tuple[OnRoom, ...] = ()

    def of(self, pod: PodId) -> float:
        """Return the tokens that the pod can take before it evicts something; infinite if that is not known."""
        return self._tokens.get(pod, math.inf)

    def set(self, pod: PodId, tokens: float) -> None:
        """Note that the pod has room for `tokens` now. Infinite: its room is not known any more."""
        if tokens == self._tokens.get(pod, math.inf):
            return
        if tokens == math.inf:
            del self._tokens[pod]
        else:
            self._tokens[pod] = tokens
        for watcher in self._watchers:
            watcher(pod, tokens)

    def watch(self, watcher: OnRoom) -> None:
        """Tell `watcher` about each pod whose room is known, and from now on about each change."""
        self._watchers = (*self._watchers, watcher)
        for pod, tokens in self._tokens.items():
            watcher(pod, tokens)

    def unwatch(self, watcher: OnRoom) -> None:
        """Stop telling `watcher`."""
        self._watchers = tuple(other for other in self._watchers if other != watcher)
