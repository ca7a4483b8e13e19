"""Which beliefs about pods are to be written to Redis, and when. Any gateway may write them, and mostly only one does.
Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from router.views.types import PodId

WRITE_S = 20.0
"""Changed beliefs are written when the last writing, by any gateway, is this old, or up to SPREAD times as old. The
gateway that draws the shortest time writes, and the others hear of it."""
SPREAD = 1.6
"""Below RETAIN_S / WRITE_S, so that changes after one writing are still in the stream at the next."""
UNCHANGED_S = 300.0
"""Unchanged beliefs are written this often: more often than they expire."""
OVERLAP_S = 1.0
"""A writing may lack changes made this shortly before it."""
ANSWER_S = 0.3
"""A wish to any gateway is granted within this time."""


@dataclass(slots=True)
class _Entry:
    written_s: float
    changed_s: float
    due_s: float
    is_answer: bool = False

    @property
    def is_changed(self) -> bool:
        return self.changed_s > self.written_s - OVERLAP_S


class WritePlan:
    """When to write each pod's beliefs. Times are seconds of one clock."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._entries: dict[PodId, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def changed(self, pod: PodId, now_s: float) -> None:
        """Note that something new is believed about the pod."""
        entry = self._entries.get(pod)
        if entry is None:
            self._entries[pod] = _Entry(now_s, now_s, self._draw(now_s))
        else:
            entry.changed_s = now_s

    def written(self, pod: PodId, now_s: float) -> None:
        """Note that some gateway wrote all that is believed about the pod."""
        entry = self._entries.get(pod)
        if entry is not None and not entry.is_answer:
            entry.written_s, entry.due_s = now_s, self._draw(now_s)

    def wrote(self, pod: PodId, now_s: float) -> None:
        """Note that this gateway wrote all that is believed about the pod."""
        if (entry := self._entries.get(pod)) is not None:
            entry.is_answer = False
        self.written(pod, now_s)

    def answer(self, pod: PodId, now_s: float) -> None:
        """Plan an answer: a gateway that had lost events wrote what it believes about the pod, and this gateway
        believes more."""
        self.changed(pod, now_s)
        self._entries[pod].is_answer = True
        self._entries[pod].due_s = now_s

    def is_answer(self, pod: PodId) -> bool:
        """Return whether the next writing of the pod is such an answer."""
        entry = self._entries.get(pod)
        return entry is not None and entry.is_answer

    def asked(self, now_s: float) -> None:
        """Plan to write all pods' beliefs soon."""
        for entry in self._entries.values():
            entry.changed_s, entry.due_s = now_s, min(entry.due_s, now_s + self._rng.uniform(0, ANSWER_S))

    def drop(self, pods: Iterable[PodId]) -> None:
        """Forget pods that are gone."""
        for pod in pods:
            self._entries.pop(pod, None)

    def pods(self) -> list[PodId]:
        """Return the pods about which anything is believed."""
        return list(self._entries)

    def unwritten(self) -> list[PodId]:
        """Return the pods whose beliefs changed since anybody wrote them."""
        return [pod for pod, entry in self._entries.items() if entry.is_changed]

    def due(self, now_s: float) -> Iterator[PodId]:
        """Yield the pods to be written now."""
        for pod, entry in self._entries.items():
            if now_s >= entry.due_s and (entry.is_changed or now_s >= entry.written_s + UNCHANGED_S):
                yield pod

    def _draw(self, now_s: float) -> float:
        return now_s + WRITE_S * self._rng.uniform(1, SPREAD)
