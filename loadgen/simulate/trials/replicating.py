"""Copies of a prefix ahead of need: as many pods as its share of the traffic would fill hold it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from loadgen.simulate.trials.variants import predicted
from router.routing.predicted_ttft import Costs, PredictedTtft
from router.routing.shares import TrafficShares
from router.routing.types import Decision, PodView, RequestInfo

HALF_LIFE_S, KEYS, DEPTH_STRIDES = 30.0, 4096, 128
"""As `affinity_groups` counts traffic."""
NEARBY_STRIDES = 4
"""Matches within so many strides of the longest count as copies."""
UNLIMITED_S = 1e9


class ByShare(PredictedTtft):
    """A copy is free while fewer pods hold the prefix than its share of the work would fill, rounded up; no debts."""

    pays_debts = False
    shares: TrafficShares

    def choose(self, request: RequestInfo, pods: Sequence[PodView], *, explain: bool = False) -> Decision:
        """See `Policy`."""
        decision = super().choose(request, pods, explain=explain)
        if not explain:
            uncached = max(0, request.prompt_tokens - decision.predicted_cached_tokens)
            self.shares.record(request.keys, uncached + request.output_tokens, request.now_s)
        return decision

    def _costs(
        self,
        request: RequestInfo,
        pods: Sequence[PodView],
        longest_match: int,
        owed_s: float,
        *,
        explain: bool = False,
    ) -> Costs:
        if not self.pays_debts:
            owed_s = 0.0
        strides = math.ceil(longest_match * len(request.keys) / request.prompt_tokens)
        if strides:
            share = self.shares.share(request.keys[min(strides, DEPTH_STRIDES) - 1], request.now_s)
            near = longest_match - NEARBY_STRIDES * request.prompt_tokens / len(request.keys)
            copies = sum(pod.matched_tokens > 0 and pod.matched_tokens >= near for pod in pods)
            if copies < math.ceil(share * len(pods)):
                owed_s = UNLIMITED_S
        return super()._costs(request, pods, longest_match, owed_s, explain=explain)


def replicating(kind: type[ByShare]) -> ByShare:
    """A policy that counts traffic as `affinity_groups` does."""
    policy = predicted(kind)
    policy.shares = TrafficShares(half_life_s=HALF_LIFE_S, limit=KEYS, depth_strides=DEPTH_STRIDES)
    return policy


class ByShareAndDebt(ByShare):
    """Copies ahead of need, and those that waiting has paid for."""

    pays_debts = True
