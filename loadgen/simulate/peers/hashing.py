"""KubeAI's bounded hash, and the power of two choices."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from xxhash import xxh64_intdigest

from loadgen.simulate.peers.base import Peer
from loadgen.simulate.pods.routing import Offered

VIRTUAL_NODES = 256
MEAN_LOAD_FACTOR = 1.25
PREFIX_CHARS = 100
CHARS_PER_TOKEN = 4


class KubeAi(Peer):
    """PrefixHash: a ring over the first 100 characters of the first user message. It chooses the first pod whose
    in-flight requests are at most 1.25 times the mean (including this request), else the first pod.
    """

    name = "kubeai_bounded_hash"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._ring: list[tuple[int, str]] = []

    def pods_changed(self, pods: Sequence[str], now_s: float) -> None:
        """See `Router`."""
        super().pods_changed(pods, now_s)
        self._ring = sorted((xxh64_intdigest(f"{pod}{i}".encode()), pod) for pod in pods for i in range(VIRTUAL_NODES))

    def pick(self, request: Offered, pods: Sequence[str], now_s: float) -> str:
        """See `Peer`."""
        head = request.tokens[request.user_start : request.user_start + PREFIX_CHARS // CHARS_PER_TOKEN]
        start = bisect_left(self._ring, (xxh64_intdigest(head.tobytes()), ""))
        bound = (sum(self.in_flight[pod] for pod in pods) + 1) / len(pods) * MEAN_LOAD_FACTOR
        allowed = set(pods)
        first = None
        for i in range(len(self._ring)):
            pod = self._ring[(start + i) % len(self._ring)][1]
            if pod not in allowed:
                continue
            first = first or pod
            if self.in_flight[pod] <= bound:
                return pod
        assert first is not None
        return first


class PowerOfTwo(Peer):
    """Chooses two pods at random and takes the one with fewer requests in flight."""

    name = "power_of_two"

    def pick(self, request: Offered, pods: Sequence[str], now_s: float) -> str:
        """See `Peer`."""
        return self.fewest(self.random.sample(list(pods), min(2, len(pods))), self.in_flight)
