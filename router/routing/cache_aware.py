"""`cache_aware`: the least loaded of the pods that hold the prefix."""

from __future__ import annotations

from router.views.pick import decide, lowest
from router.views.table import CandidatePods
from router.views.types import Decision, RequestInfo

_ELSEWHERE = 1e9
"""A number of tokens above any load: added to a pod's score, it moves the pod behind all others."""


class CacheAware:
    """A pod holds the prefix if its match is at least `match_share` of the longest.

    If the longest match is below `min_prompt_share` of the prompt, no pod counts as a holder. Otherwise a short text
    common to all requests would keep them all on the pod that saw it first.
    """

    name = "cache_aware"

    def __init__(self, match_share: float, min_prompt_share: float) -> None:
        self._match_share = match_share
        self._min_prompt_share = min_prompt_share

    def choose(self, request: RequestInfo, pods: CandidatePods, *, explain: bool = False) -> Decision:
        """See `Policy.choose`. Scores are loads in tokens; pods without the prefix score behind all others."""
        scores, needed = pods.load(request.now_s), self._needed(request, pods.longest)
        if pods.matched is not None:
            scores += _ELSEWHERE * (pods.matched < needed)
        return decide(self.name, pods, lowest(request, pods, scores), scores if explain else None)

    def _needed(self, request: RequestInfo, longest: int) -> float:
        """Return how many matched tokens make a pod a holder, if the longest match has `longest` tokens."""
        return self._match_share * longest if longest >= self._min_prompt_share * request.prompt_tokens else 0.0
