"""NVIDIA Dynamo's KV router: `cost = prefill blocks + decode blocks`, from its documentation."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.simulate.peers.base import Events, Peer
from loadgen.simulate.pod import Report
from loadgen.simulate.routing import Offered

BLOCK_TOKENS = 16
KEY_TOKENS = 64
OVERLAP_CREDIT = 1.0
PREFILL_SCALE = 1.0
"""kv_overlap_score_credit and prefill_load_scale; router_temperature is 0."""


class DynamoKv(Peer):
    """Least (active prefill + own uncached blocks) + (active decode + own blocks). Overlap from KV events, activity
    from what this router sent: prefill until the first token, blocks until the end. Predicted inserts are off, as
    shipped.
    """

    name = "dynamo_kv"
    takes_reports = True

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._events = Events()

    def pick(self, request: Offered, pods: Sequence[str], now_s: float) -> str:
        """See `Peer`."""
        prefill = dict.fromkeys(pods, 0.0)
        decode = dict.fromkeys(pods, 0.0)
        for sent in self.sent.values():
            if sent.pod not in decode:
                continue
            decode[sent.pod] += sent.prompt_tokens / BLOCK_TOKENS
            if not sent.has_first_token:
                prefill[sent.pod] += sent.uncached_tokens / BLOCK_TOKENS
        own = len(request.tokens) / BLOCK_TOKENS
        costs = {}
        for pod in pods:
            credit = OVERLAP_CREDIT * self._events.match(pod, request.keys) * KEY_TOKENS / BLOCK_TOKENS
            costs[pod] = PREFILL_SCALE * max(prefill[pod] + own - credit, 0.0) + decode[pod] + own
        return self.fewest(pods, costs)

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
