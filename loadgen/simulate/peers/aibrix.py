"""AIBrix' `prefix-cache` strategy, with the constants of its source."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from loadgen.simulate.peers.base import History, Peer
from loadgen.simulate.pods.routing import Offered

IMBALANCE = 8
"""If the busiest and the idlest pod differ by more running requests than this, the strategy ignores the prefix."""
STANDARD_DEVIATIONS = 1.0
EVICTION_S = 20 * 60.0
BLOCKS = 200_000


class AibrixPrefixCache(Peer):
    """If the busiest and the idlest pod differ by more than 8 running requests, choose the idlest. Otherwise sort the
    pods with a cached prefix by the length of that prefix, then by requests, and choose the first with at most mean + 1
    standard deviation of requests. If no pod qualifies, choose the idlest. The table holds what this router sent in the
    last 20 minutes."""

    name = "aibrix_prefix_cache"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._table = History(BLOCKS, EVICTION_S)

    def pick(self, request: Offered, pods: Sequence[str], now_s: float) -> str:
        """See `Peer`."""
        running = [self.in_flight[pod] for pod in pods]
        if max(running) - min(running) <= IMBALANCE:
            bound = statistics.fmean(running) + STANDARD_DEVIATIONS * statistics.pstdev(running)
            matched = {pod: self._table.match(pod, request.keys) for pod in pods}
            for pod in sorted(pods, key=lambda pod: (-matched[pod], self.in_flight[pod])):
                if matched[pod] and self.in_flight[pod] <= bound:
                    return pod
        return self.fewest(pods, self.in_flight)

    def routed(self, request: Offered, pod: str, now_s: float) -> None:
        """See `Peer`."""
        self._table.add(pod, request.keys, now_s)

    def pods_changed(self, pods: Sequence[str], now_s: float) -> None:
        """See `Router`."""
        super().pods_changed(pods, now_s)
        self._table.forget(pods)
