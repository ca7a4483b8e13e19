"""Which pods' beliefs are to be written to Redis, so that any gateway does it and, mostly, one alone. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from router.routing.types import PodId

WRITE_S = 20.0
"""Changed beliefs are written when the last writing, by any gateway, is this old, or up to SPREAD times as much: who
draws the shortest time writes, and the others hear of it."""
SPREAD = 1.6
"""Below RETAIN_S / WRITE_S, so that what changed after a writing is still in the stream at the next."""
UNCHANGED_S = 300.0
"""Unchanged ones are written this often, below the time for which they are kept."""
OVERLAP_S = 1.0
"""A writing may lack what changed so shortly before."""
ANSWER_S = 0.3
"""A wish for what any gateway knows is granted within this."""


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
    """Times are seconds of one clock."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._entries: dict[PodId, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def changed(self, pod: PodId, now_s: float) -> None:
        """Something new is believed of the pod."""
        entry = self._entries.get(pod)
        if entry is None:
            self._entries[pod] = _Entry(now_s, now_s, self._draw(now_s))
        else:
            entry.changed_s = now_s

    def written(self, pod: PodId, now_s: float) -> None:
        """Somebody wrote all that is believed of it."""
        entry = self._entries.get(pod)
        if entry is not None and not entry.is_answer:
            entry.written_s, entry.due_s = now_s, self._draw(now_s)

    def wrote(self, pod: PodId, now_s: float) -> None:
        """This gateway did."""
        if (entry := self._entries.get(pod)) is not None:
            entry.is_answer = False
        self.written(pod, now_s)

    def answer(self, pod: PodId, now_s: float) -> None:
        """More is believed of the pod than somebody wrote who had to make good what he could not tell."""
        self.changed(pod, now_s)
        self._entries[pod].is_answer = True
        self._entries[pod].due_s = now_s

    def is_answer(self, pod: PodId) -> bool:
        """Whether the next writing of the pod is such an answer."""
        entry = self._entries.get(pod)
        return entry is not None and entry.is_answer

    def asked(self, now_s: float) -> None:
        """All of it is wanted soon."""
        for entry in self._entries.values():
            entry.changed_s, entry.due_s = now_s, min(entry.due_s, now_s + self._rng.uniform(0, ANSWER_S))

    def drop(self, pods: Iterable[PodId]) -> None:
        """These are gone."""
        for pod in pods:
            self._entries.pop(pod, None)

    def pods(self) -> list[PodId]:
        """Those of which anything is believed."""
        return list(self._entries)

    def unwritten(self) -> list[PodId]:
        """Those of which something changed since anybody wrote it."""
        return [pod for pod, entry in self._entries.items() if entry.is_changed]

    def due(self, now_s: float) -> Iterator[PodId]:
        """Those to be written now."""
        for pod, entry in self._entries.items():
            if now_s >= entry.due_s and (entry.is_changed or now_s >= entry.written_s + UNCHANGED_S):
                yield pod

    def _draw(self, now_s: float) -> float:
        return now_s + WRITE_S * self._rng.uniform(1, SPREAD)
