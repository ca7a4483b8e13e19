"""llm-d's endpoint picker (formerly the Gateway API's): weighted scorers over metrics scraped every 50 ms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loadgen.simulate.peers.base import Events, History, Peer
from loadgen.simulate.pods.pod import Report
from loadgen.simulate.pods.routing import Offered

SCRAPE_S = 0.05
APPROXIMATE_BLOCKS = 31_250
"""Capacity per pod of the approximate prefix producer's LRU, in blocks of 64 tokens."""
MAX_PREFIX_TOKENS = 131_072
KEY_TOKENS = 64
SPECULATIVE_S = 2.0
"""Lifetime of the precise producer's entry for a request that was just routed."""


class LlmD(Peer):
    """Chooses the highest sum of weight x score. The scores: prefix = matched / total blocks;
    queue = (max - q) / (max - min) for q waiting requests; kv = 1 - usage."""

    scrape_s = SCRAPE_S

    def __init__(self, seed: int, prefix: float, queue: float, kv: float) -> None:
        super().__init__(seed)
        self._weights = (prefix, queue, kv)

    def matched(self, request: Offered, pod: str, now_s: float) -> int:
        """Return the number of leading keys that the pod is believed to hold."""
        raise NotImplementedError

    def pick(self, request: Offered, pods: Sequence[str], now_s: float) -> str:
        """See `Peer`."""
        prefix_weight, queue_weight, kv_weight = self._weights
        queues = {pod: self.scrape_of(pod).waiting for pod in pods}
        blocks = max(1, min(len(request.keys), MAX_PREFIX_TOKENS // KEY_TOKENS))
        scores = {
            pod: prefix_weight * min(1.0, self.matched(request, pod, now_s) / blocks)
            + queue_weight * _least_is_one(pod, queues)
            + kv_weight * (1 - self.scrape_of(pod).kv_usage)
            for pod in pods
        }
        return self.best(pods, scores)


class LlmDApproximate(LlmD):
    """The default weights 3:2:2, with an index of the prefixes that this router sent."""

    name = "llmd_322"

    def __init__(self, seed: int) -> None:
        super().__init__(seed, 3.0, 2.0, 2.0)
        self._history = History(APPROXIMATE_BLOCKS)

    def matched(self, request: Offered, pod: str, now_s: float) -> int:
        """See `LlmD`."""
        return self._history.match(pod, request.keys)

    def routed(self, request: Offered, pod: str, now_s: float) -> None:
        """See `Peer`."""
        self._history.add(pod, request.keys, now_s)

    def pods_changed(self, pods: Sequence[str], now_s: float) -> None:
        """See `Router`."""
        super().pods_changed(pods, now_s)
        self._history.forget(pods)


class LlmDPrecise(LlmD):
    """Weights 2:1:1, as in llm-d's published benchmark; KV events and speculative entries of 2 s feed the index."""

    name = "llmd_211"
    takes_reports = True

    def __init__(self, seed: int) -> None:
        super().__init__(seed, 2.0, 1.0, 1.0)
        self._events = Events()
        self._speculative = History(APPROXIMATE_BLOCKS, SPECULATIVE_S)

    def matched(self, request: Offered, pod: str, now_s: float) -> int:
        """See `LlmD`."""
        return max(self._events.match(pod, request.keys), self._speculated(request, pod, now_s))

    def routed(self, request: Offered, pod: str, now_s: float) -> None:
        """See `Peer`."""
        self._speculative.add(pod, request.keys, now_s)

    def reported(self, pod: str, report: Report, now_s: float) -> None:
        """See `Router`."""
        if pod in self.in_flight:
            self._events.apply(pod, report)

    def pods_changed(self, pods: Sequence[str], now_s: float) -> None:
        """See `Router`."""
        super().pods_changed(pods, now_s)
        self._events.forget(pods)
        self._speculative.forget(pods)

    def _speculated(self, request: Offered, pod: str, now_s: float) -> int:
        for i, key in enumerate(request.keys):
            if self._speculative.last_use_s(pod, key) < now_s - SPECULATIVE_S:
                return i
        return len(request.keys)


def _least_is_one(pod: str, values: Mapping[str, int]) -> float:
    low, high = min(values.values()), max(values.values())
    return 1.0 if high == low else (high - values[pod]) / (high - low)
