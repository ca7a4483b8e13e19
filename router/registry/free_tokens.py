"""Tokens that each pod's cache takes before it evicts something, updated when the estimates change."""

from __future__ import annotations

import math
from collections.abc import Callable

from router.views.types import PodId

OnFreeTokens = Callable[[PodId, float], None]
"""Called with a pod and its free tokens."""


class FreeTokens:
    """The free tokens of each pod. Decisions read them here, so that none has to ask for each pod's estimate."""

    def __init__(self) -> None:
        self._tokens: dict[PodId, float] = {}
        """Pods whose free tokens are known -> tokens."""
        self._watchers: tuple[OnFreeTokens, ...] = ()

    def of(self, pod: PodId) -> float:
        """Return the tokens that the pod can take before it evicts something; infinite if that is not known."""
        return self._tokens.get(pod, math.inf)

    def set(self, pod: PodId, tokens: float) -> None:
        """Note that the pod has `tokens` free now. Infinite: that is not known any more."""
        if tokens == self._tokens.get(pod, math.inf):
            return
        if tokens == math.inf:
            del self._tokens[pod]
        else:
            self._tokens[pod] = tokens
        for watcher in self._watchers:
            watcher(pod, tokens)

    def watch(self, watcher: OnFreeTokens) -> None:
        """Tell `watcher` about each pod whose free tokens are known, and from now on about each change."""
        self._watchers = (*self._watchers, watcher)
        for pod, tokens in self._tokens.items():
            watcher(pod, tokens)

    def unwatch(self, watcher: OnFreeTokens) -> None:
        """Stop telling `watcher`."""
        self._watchers = tuple(other for other in self._watchers if other != watcher)
