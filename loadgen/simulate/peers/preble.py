"""Preble's E2 (exploitation + exploration), Srivatsa et al., ICLR 2025: the global scheduler's cost per GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from loadgen.simulate.peers.base import History, Peer
from loadgen.simulate.pods.routing import Offered

WINDOW_S = 180.0
"""Length of the history H over which the load is summed."""
BALANCE = 2.0
"""Th_bal: if a GPU has this many times the load of the lightest, its exploited requests go to the lightest."""
KEY_TOKENS = 64
CACHE_KEYS = 410_000 // KEY_TOKENS
"""Assumed capacity of a GPU's cache: that of the 8B profile."""


def prefill_s(tokens: float) -> float:
    """Return Preble's regression for Mistral-7B on an A6000, in seconds: 22 ms below 192 tokens, else 4.21 + 0.1084 T
    ms for T tokens, both divided by 0.9."""
    return (22.0 if tokens < 192 else 4.21 + 0.1084 * tokens) / 0.9e3


def decode_s(context_tokens: float, output_tokens: float) -> float:
    """Return the attention time of the decode steps by the same regression."""
    return output_tokens * (1.86e-4 * context_tokens + 0.159) / 0.9e3


class PrebleE2(Peer):
    """If some GPU has more of the prompt cached than missing, choose the GPU with the longest cached prefix. But if its
    load is over twice the lightest GPU's load, choose the lightest. Otherwise choose the least L + M + P: load in the
    last 3 minutes, prefill lost by eviction, the request's prefill."""

    name = "preble_e2"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._tree = History(CACHE_KEYS)
        self._loads: dict[str, deque[tuple[float, float]]] = {}
        self._sums: dict[str, float] = {}
        self._output_tokens = 128.0

    def pick(self, request: Offered, pods: Sequence[str], now_s: float) -> str:
        """See `Peer`."""
        prompt = len(request.tokens)
        cached = {pod: self._tree.match(pod, request.keys) * KEY_TOKENS for pod in pods}
        loads = {pod: self._load(pod, now_s) for pod in pods}
        longest = max(cached.values())
        if longest > prompt - longest:
            best = self.fewest([pod for pod in pods if cached[pod] == longest], loads)
            lightest = self.fewest(pods, loads)
            return lightest if loads[best] > BALANCE * max(loads[lightest], prefill_s(prompt)) else best
        costs = {
            pod: loads[pod] + self._evicted_s(pod, prompt - cached[pod]) + prefill_s(prompt - cached[pod])
            for pod in pods
        }
        return self.fewest(pods, costs)

    def routed(self, request: Offered, pod: str, now_s: float) -> None:
        """See `Peer`."""
        missing = max(0, len(request.tokens) - self._tree.match(pod, request.keys) * KEY_TOKENS)
        work_s = prefill_s(missing) + decode_s(len(request.tokens), self._output_tokens)
        self._loads.setdefault(pod, deque()).append((now_s, work_s))
        self._sums[pod] = self._sums.get(pod, 0.0) + work_s
        self._tree.add(pod, request.keys, now_s)

    def ended(self, request: Offered, pod: str, now_s: float, *, completed: bool) -> None:
        """See `Router`."""
        super().ended(request, pod, now_s, completed=completed)
        self._output_tokens += 0.05 * (request.output_tokens - self._output_tokens)

    def pods_changed(self, pods: Sequence[str], now_s: float) -> None:
        """See `Router`."""
        super().pods_changed(pods, now_s)
        self._tree.forget(pods)

    def _load(self, pod: str, now_s: float) -> float:
        window = self._loads.get(pod)
        while window and window[0][0] < now_s - WINDOW_S:
            self._sums[pod] -= window.popleft()[1]
        return self._sums.get(pod, 0.0)

    def _evicted_s(self, pod: str, missing_tokens: int) -> float:
        """Return the prefill time lost by eviction, assuming that evicted prefixes are requested once more."""
        over = self._tree.keys_of(pod) * KEY_TOKENS + missing_tokens - CACHE_KEYS * KEY_TOKENS
        return prefill_s(over) if over > 0 else 0.0
