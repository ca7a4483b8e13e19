"""Consistent-hash rings, kept for the last few sets of pods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from uhashring import HashRing
from xxhash import xxh3_64_intdigest

from engine.contract.keys import PrefixKey
from router.views.table import Floats, PodTable, WidePods
from router.views.types import PodId, PodView

VNODES = 100
"""Points on the ring of a pod of weight 1: shares of equal pods then differ by about 10 %."""
_RINGS_KEPT = 8
"""Retries leave out single pods, so a few sets alternate; building a ring costs about 0.1 ms a pod."""


class Rings:
    """A ring for each set of pods; a pod has the same points on all rings."""

    def __init__(self) -> None:
        self._rings: dict[frozenset[tuple[PodId, float]], HashRing] = {}
        self._wide: tuple[PodTable, Floats, HashRing] | None = None
        """The table for which a ring was last needed, its weights then, and the ring."""

    def owner(self, key: PrefixKey, pods: Sequence[PodView]) -> PodId:
        """The first pod at or after `key` on the ring."""
        return PodId(self._ring_of(pods).get_node(str(key)))

    def successors(self, key: PrefixKey, pods: Sequence[PodView], count: int | None = None) -> Iterator[PodId]:
        """Yield distinct pods in ring order from `key`: all, or the first `count`."""
        return islice((PodId(name) for name in self._ring_of(pods).iterate_nodes(str(key))), count)

    def successors_wide(self, key: PrefixKey, pods: WidePods) -> Iterator[int]:
        """Yield the rows of all `successors`."""
        weights, wide = pods.columns.weight, self._wide
        if wide is None or wide[0] is not pods.table or not np.array_equal(wide[1], weights):
            of_pods = zip(pods.table.ids, weights.tolist(), strict=True)
            wide = self._wide = (pods.table, weights.copy(), self._ring(frozenset(of_pods)))
        for name in wide[2].iterate_nodes(str(key)):
            row = pods.table.row(PodId(name))
            assert row is not None
            yield row

    def _ring_of(self, pods: Sequence[PodView]) -> HashRing:
        return self._ring(frozenset([(pod.pod_id, pod.weight) for pod in pods]))

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


def position(pods: Sequence[PodView], pod_id: PodId) -> int:
    """Index of the pod with that id."""
    return next(i for i, pod in enumerate(pods) if pod.pod_id == pod_id)
