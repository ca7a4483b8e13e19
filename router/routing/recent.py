"""Who has been given how much lately: settles which of several equally good pods takes a request."""

from __future__ import annotations

import math

from router.routing.types import PodId

_PODS = 4096


class RecentWork:
    """Tokens of work sent to each pod; they halve every `half_life_s`."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._sent: dict[PodId, tuple[float, float]] = {}
        """Pod -> (tokens, as of), longest unused first."""

    def tokens(self, pod_id: PodId, now_s: float) -> float:
        """Decayed tokens sent to the pod."""
        tokens, at_s = self._sent.get(pod_id, (0.0, now_s))
        return tokens * math.exp2((at_s - now_s) / self._half_life_s)

    def add(self, pod_id: PodId, tokens: float, now_s: float) -> None:
        """Count work sent to the pod."""
        tokens += self.tokens(pod_id, now_s)
        self._sent.pop(pod_id, None)
        self._sent[pod_id] = (tokens, now_s)
        if len(self._sent) > _PODS:
            del self._sent[next(iter(self._sent))]
