"""Consistent-hash rings, kept for the last few sets of pods."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from uhashring import HashRing
from xxhash import xxh3_64_intdigest

from engine.contract.keys import PrefixKey
from router.views.table import CandidatePods, Floats, PodTable
from router.views.types import PodId

VNODES = 100
"""Points on the ring of a pod of weight 1: shares of equal pods then differ by about 10 %."""
_RINGS_KEPT = 8
"""Retries leave out single pods, so a few sets alternate; building a ring costs about 0.1 ms a pod."""


class Rings:
    """A ring for each set of pods; a pod has the same points on all rings."""

    def __init__(self) -> None:
        self._rings: dict[frozenset[tuple[PodId, float]], HashRing] = {}
        self._last: tuple[PodTable, Floats, HashRing] | None = None
        """The table for which a ring was last needed, its weights then, and the ring."""

    def successors(self, key: PrefixKey, pods: CandidatePods) -> Iterator[int]:
        """Yield the rows of all pods in ring order from `key`."""
        weights, last = pods.columns.weight, self._last
        if last is None or last[0] is not pods.table or not np.array_equal(last[1], weights):
            of_pods = zip(pods.table.ids, weights.tolist(), strict=True)
            last = self._last = (pods.table, weights.copy(), self._ring(frozenset(of_pods)))
        for name in last[2].iterate_nodes(str(key)):
            row = pods.table.row(PodId(name))
            assert row is not None
            yield row

    def _ring(self, weights: frozenset[tuple[PodId, float]]) -> HashRing:
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
