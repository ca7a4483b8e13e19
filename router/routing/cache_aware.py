"""`cache_aware`: the least loaded of the pods that hold the prefix."""

from __future__ import annotations

from collections.abc import Sequence

from router.routing.pick import decide, load, lowest
from router.routing.types import Decision, PodView, RequestInfo

_ELSEWHERE = 1e9
"""Tokens; above any load."""


class CacheAware:
    """A pod holds the prefix if its match is at least `match_share` of the longest; without a match, all pods do."""

    name = "cache_aware"

    def __init__(self, match_share: float) -> None:
        self._match_share = match_share

    def choose(self, request: RequestInfo, pods: Sequence[PodView], *, explain: bool = False) -> Decision:
        """See `Policy.choose`; scores are loads in tokens, those of pods without the prefix behind all others."""
        needed = self._match_share * max(pod.matched_tokens for pod in pods)
        scores = [load(pod) + (_ELSEWHERE if pod.matched_tokens < needed else 0.0) for pod in pods]
        return decide(self.name, pods, lowest(request, pods, scores), scores if explain else ())
