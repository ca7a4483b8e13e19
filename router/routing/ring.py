"""Consistent-hash rings, kept for the sets of pods seen last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from uhashring import HashRing
from xxhash import xxh3_64_intdigest

from engine.contract.keys import PrefixKey
from router.routing.types import PodId, PodView

VNODES = 100
"""Points on the ring of a pod of weight 1: shares of equal pods then differ by about 10 %."""
_RINGS_KEPT = 8
"""Retries leave single pods out, so a few sets alternate; building a ring costs about 0.1 ms a pod."""


class Rings:
    """A ring for each set of pods; a pod keeps its points in all of them."""

    def __init__(self) -> None:
        self._rings: dict[frozenset[tuple[PodId, float]], HashRing] = {}

    def owner(self, key: PrefixKey, pods: Sequence[PodView]) -> PodId:
        """The first pod at or after `key` on the ring."""
        return PodId(self._ring(pods).get_node(str(key)))

    def successors(self, key: PrefixKey, pods: Sequence[PodView], count: int | None = None) -> Iterator[PodId]:
        """Distinct pods in ring order from `key`: all, or the first `count`."""
        return islice((PodId(name) for name in self._ring(pods).iterate_nodes(str(key))), count)

    def _ring(self, pods: Sequence[PodView]) -> HashRing:
        weights = frozenset([(pod.pod_id, pod.weight) for pod in pods])
        ring = self._rings.pop(weights, None)
        if ring is None:
            while len(self._rings) >= _RINGS_KEPT:
                del self._rings[next(iter(self._rings))]
            points = {pod_id: {"vnodes": max(1, round(VNODES * weight))} for pod_id, weight in sorted(weights)}
            ring = HashRing(points, hash_fn=_hash)
        self._rings[weights] = ring
        return ring


def _hash(name: str) -> int:
    return xxh3_64_intdigest(name.encode())


def position(pods: Sequence[PodView], pod_id: PodId) -> int:
    """Index of the pod with that id."""
    return next(i for i, pod in enumerate(pods) if pod.pod_id == pod_id)
