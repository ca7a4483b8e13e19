"""`cache_aware`: the least loaded of the pods that hold the prefix."""

from __future__ import annotations

from collections.abc import Sequence

from router.views.pick import decide, load, lowest
from router.views.table import WidePods, WidePolicy
from router.views.types import Decision, PodView, RequestInfo

_ELSEWHERE = 1e9
"""A number of tokens above any load: added to a pod's score, it moves the pod behind all others."""


class CacheAware(WidePolicy):
    """A pod holds the prefix if its match is at least `match_share` of the longest.

    If the longest match is below `min_prompt_share` of the prompt, no pod counts as a holder. Otherwise a short text
    common to all requests would keep them all on the pod that saw it first.
    """

    name = "cache_aware"

    def __init__(self, match_share: float, min_prompt_share: float) -> None:
        self._match_share = match_share
        self._min_prompt_share = min_prompt_share

    def choose(self, request: RequestInfo, pods: Sequence[PodView], *, explain: bool = False) -> Decision:
        """See `Policy.choose`. Scores are loads in tokens; pods without the prefix score behind all others."""
        needed = self._needed(request, max(pod.matched_tokens for pod in pods))
        scores = [load(pod) + (_ELSEWHERE if pod.matched_tokens < needed else 0.0) for pod in pods]
        return decide(self.name, pods, lowest(request, pods, scores), scores if explain else ())

    def choose_wide(self, request: RequestInfo, pods: WidePods) -> Decision:
        """See `WidePolicy.choose_wide`."""
        scores, needed = pods.load(request.now_s), self._needed(request, pods.longest)
        if pods.matched is not None:
            scores += _ELSEWHERE * (pods.matched < needed)
        return pods.decision(self.name, pods.lowest(request, scores))

    def _needed(self, request: RequestInfo, longest: int) -> float:
        """Return how many matched tokens make a pod a holder, if the longest match has `longest` tokens."""
        return self._match_share * longest if longest >= self._min_prompt_share * request.prompt_tokens else 0.0
