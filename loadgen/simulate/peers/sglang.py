"""SGLang Model Gateway: `cache_aware` over HTTP and `least_load`, from the published formulas."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.simulate.peers.base import History, Peer
from loadgen.simulate.routing import Offered

CACHE_THRESHOLD = 0.3
BALANCE_ABS = 64
BALANCE_REL = 1.5
MAX_TREE_CHARS = 2**26
"""Defaults of the command line, model_gateway policies/cache_aware."""
CHARS_PER_KEY = 256

THROUGHPUT_TOKENS_PER_S = 2000.0
MEAN_PREFILL_TOKENS = 1024
KV_WEIGHT = 0.15
POLL_S = 10.0
"""Defaults of `least_load`."""


class SglangCacheAware(Peer):
    """Balanced by in-flight requests: the worker that was sent the longest prefix, if that is over 30 % of the text,
    else the least loaded. Imbalanced (max - min > 64 and max > 1.5 min): the least loaded. The tree is what it sent.
    """

    name = "sglang_cache_aware"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._tree = History(MAX_TREE_CHARS // CHARS_PER_KEY)

    def pick(self, request: Offered, pods: Sequence[str], now_s: float) -> str:
        """See `Peer`."""
        loads = [self.in_flight[pod] for pod in pods]
        if max(loads) - min(loads) > BALANCE_ABS and max(loads) > BALANCE_REL * min(loads):
            return self.fewest(pods, self.in_flight)
        matches = {pod: self._tree.match(pod, request.keys) for pod in pods}
        longest = max(matches.values())
        if request.keys and longest * CHARS_PER_KEY > CACHE_THRESHOLD * 4 * len(request.tokens):
            deepest = request.keys[longest - 1]
            return max(
                [pod for pod in pods if matches[pod] == longest], key=lambda pod: self._tree.last_use_s(pod, deepest)
            )
        return self.fewest(pods, self.in_flight)

    def routed(self, request: Offered, pod: str, now_s: float) -> None:
        """See `Peer`."""
        self._tree.add(pod, request.keys, now_s)

    def pods_changed(self, pods: Sequence[str], now_s: float) -> None:
        """See `Router`."""
        super().pods_changed(pods, now_s)
        self._tree.forget(pods)


class SmgLeastLoad(Peer):
    """Least (queued + in-flight tokens) / throughput + 0.15 k / (1 - k), k the KV use; polled every 10 s."""

    name = "smg_least_load"
    scrape_s = POLL_S

    def pick(self, request: Offered, pods: Sequence[str], now_s: float) -> str:
        """See `Peer`."""
        tokens = dict.fromkeys(pods, 0)
        for sent in self.sent.values():
            if sent.pod in tokens:
                tokens[sent.pod] += sent.prompt_tokens
        scores = {}
        for pod in pods:
            scrape = self.scrape_of(pod)
            kv = min(scrape.kv_usage, 0.99)
            queued = scrape.waiting * MEAN_PREFILL_TOKENS
            scores[pod] = (queued + tokens[pod]) / THROUGHPUT_TOKENS_PER_S + KV_WEIGHT * kv / (1 - kv)
        return self.fewest(pods, scores)
