"""SGLang Model Gateway: `cache_aware` over HTTP and `least_load`, from the published formulas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from loadgen.simulate.peers.base import History, Peer
from loadgen.simulate.pods.routing import Offered, Scrape

CACHE_THRESHOLD = 0.3
BALANCE_ABS = 64
BALANCE_REL = 1.5
MAX_TREE_CHARS = 2**26
"""Defaults of the command line (model_gateway, policies/cache_aware)."""
CHARS_PER_KEY = 256

THROUGHPUT_TOKENS_PER_S = 2000.0
MEAN_PREFILL_TOKENS = 1024
KV_WEIGHT = 0.15
POLL_S = 10.0
"""Defaults of `least_load`."""


class SglangCacheAware(Peer):
    """If in-flight requests are not balanced (max - min > 64 and max > 1.5 min), choose the least loaded worker.
    Otherwise choose the worker that was sent the longest prefix; but if that prefix is at most 30 % of the text, choose
    the least loaded worker. The tree holds what this router sent. Among equally loaded workers, choose the one with the
    fewest requests so far, then the first."""

    name = "sglang_cache_aware"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._tree = History(MAX_TREE_CHARS // CHARS_PER_KEY)
        self._processed: Counter[str] = Counter()

    def pick(self, request: Offered, pods: Sequence[str], now_s: float) -> str:
        """See `Peer`."""
        loads = [self.in_flight[pod] for pod in pods]
        if max(loads) - min(loads) > BALANCE_ABS and max(loads) > BALANCE_REL * min(loads):
            return self._least_loaded(pods)
        matches = {pod: self._tree.match(pod, request.keys) for pod in pods}
        longest = max(matches.values())
        if request.keys and longest * CHARS_PER_KEY > CACHE_THRESHOLD * 4 * len(request.tokens):
            deepest = request.keys[longest - 1]
            return max(
                [pod for pod in pods if matches[pod] == longest], key=lambda pod: self._tree.last_use_s(pod, deepest)
            )
        return self._least_loaded(pods)

    def routed(self, request: Offered, pod: str, now_s: float) -> None:
        """See `Peer`."""
        self._tree.add(pod, request.keys, now_s)
        self._processed[pod] += 1

    def pods_changed(self, pods: Sequence[str], now_s: float) -> None:
        """See `Router`."""
        super().pods_changed(pods, now_s)
        self._tree.forget(pods)
        self._processed = Counter({pod: self._processed[pod] for pod in pods})

    def _least_loaded(self, pods: Sequence[str]) -> str:
        return min(pods, key=lambda pod: (self.in_flight[pod], self._processed[pod]))


class SmgLeastLoad(Peer):
    """Chooses the least (queued + dispatched since the last poll) / throughput + 0.15 k / (1 - k), where k is the KV
    use. Polls every 10 s.

    A waiting request is taken as 1,024 tokens, and the throughput as 2,000 tokens/s: the published substitutes for
    gauges that an engine lacks. Before the first poll, choose the fewest requests in flight. A worker that joined since
    the poll counts as the least waiting worker, with its requests in flight in addition."""

    name = "smg_least_load"
    scrape_s = POLL_S

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._since_poll: Counter[str] = Counter()
        """Pod -> prompt tokens sent since the last poll."""

    def pick(self, request: Offered, pods: Sequence[str], now_s: float) -> str:
        """See `Peer`."""
        scores = {pod: self._wait_s(pod) for pod in pods if pod in self.scrapes}
        if not scores:
            return self.fewest(pods, self.in_flight)
        least_s = min(scores.values())
        for pod in pods:
            if pod not in scores:
                scores[pod] = least_s + self.in_flight[pod] * MEAN_PREFILL_TOKENS / THROUGHPUT_TOKENS_PER_S
        return self.fewest(pods, scores)

    def routed(self, request: Offered, pod: str, now_s: float) -> None:
        """See `Peer`."""
        self._since_poll[pod] += len(request.tokens)

    def scraped(self, pod: str, scrape: Scrape, now_s: float) -> None:
        """See `Router`."""
        super().scraped(pod, scrape, now_s)
        self._since_poll[pod] = 0

    def _wait_s(self, pod: str) -> float:
        scrape = self.scrapes[pod]
        kv = min(scrape.kv_usage, 0.999)
        tokens = scrape.waiting * MEAN_PREFILL_TOKENS + self._since_poll[pod]
        return tokens / THROUGHPUT_TOKENS_PER_S + KV_WEIGHT * kv / (1 - kv)
