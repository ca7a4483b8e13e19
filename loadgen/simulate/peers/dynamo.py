"""NVIDIA Dynamo's KV router: `cost = prefill blocks + decode blocks`, from its documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.contract.keys import PrefixKey
from loadgen.simulate.peers.base import Events, Peer
from loadgen.simulate.pods.pod import Report
from loadgen.simulate.pods.routing import Offered

BLOCK_TOKENS = 16
KEY_TOKENS = 64
KEY_BLOCKS = KEY_TOKENS // BLOCK_TOKENS
OVERLAP_CREDIT = 1.0
PREFILL_SCALE = 1.0
"""kv_overlap_score_credit and prefill_load_scale; router_temperature is 0."""


class DynamoKv(Peer):
    """Chooses the pod with the least (active prefill + the request's uncached blocks) + (active decode + its blocks).
    Overlap comes from KV events, activity from what this router sent: prefill until the first token, blocks until the
    end. A block that several requests share counts once (ActiveSequences of lib/kv-router). Predicted inserts are off,
    as shipped."""

    name = "dynamo_kv"
    takes_reports = True

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._events = Events()
        self._active: dict[str, Counter[PrefixKey]] = {}
        """Pod -> keys of its active requests, with the number of requests that hold each key."""
        self._tails: dict[str, int] = {}
        """Pod -> tokens of its active requests after the last key."""

    def pick(self, request: Offered, pods: Sequence[str], now_s: float) -> str:
        """See `Peer`."""
        prefill = dict.fromkeys(pods, 0.0)
        for sent in self.sent.values():
            if sent.pod in prefill and not sent.has_first_token:
                prefill[sent.pod] += sent.uncached_tokens / BLOCK_TOKENS
        own = len(request.tokens) / BLOCK_TOKENS
        costs = {}
        for pod in pods:
            active = self._active[pod]
            decode = (KEY_TOKENS * len(active) + self._tails[pod]) / BLOCK_TOKENS
            shared = KEY_BLOCKS * sum(key in active for key in request.keys)
            credit = OVERLAP_CREDIT * self._events.match(pod, request.keys) * KEY_BLOCKS
            costs[pod] = PREFILL_SCALE * max(prefill[pod] + own - credit, 0.0) + decode + own - shared
        return self.fewest(pods, costs)

    def routed(self, request: Offered, pod: str, now_s: float) -> None:
        """See `Peer`."""
        self._active[pod].update(request.keys)
        self._tails[pod] += _tail_tokens(request)

    def ended(self, request: Offered, pod: str, now_s: float, *, completed: bool) -> None:
        """See `Router`."""
        super().ended(request, pod, now_s, completed=completed)
        if pod not in self._active:
            return
        active = self._active[pod]
        active.subtract(request.keys)
        for key in request.keys:
            if not active[key]:
                del active[key]
        self._tails[pod] -= _tail_tokens(request)

    def uncached_tokens(self, request: Offered, pod: str, now_s: float) -> int:
        """See `Peer`."""
        return max(0, len(request.tokens) - self._events.match(pod, request.keys) * KEY_TOKENS)

    def reported(self, pod: str, report: Report, now_s: float) -> None:
        """See `Router`."""
        if pod in self.in_flight:
            self._events.apply(pod, report)

    def pods_changed(self, pods: Sequence[str], now_s: float) -> None:
        """See `Router`."""
        super().pods_changed(pods, now_s)
        self._events.forget(pods)
        self._active = {pod: self._active.get(pod, Counter()) for pod in pods}
        self._tails = {pod: self._tails.get(pod, 0) for pod in pods}


def _tail_tokens(request: Offered) -> int:
    return len(request.tokens) - KEY_TOKENS * len(request.keys)
