"""Which gateway writes to Redis what is assumed about a pod, and when. Pure.

No gateway leads. All compute from the same gateways which of them writes a pod's keys; while they differ about who
runs, two may write, which does no harm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from router.peer_sync.messages import Life
from router.views.types import PodId

WRITE_S = 20.0
"""What has changed is written when the last writing is this old. With the time until gateways notice that the writer
has died, this is less than messages are kept: so changes after one writing are still in the stream at the next."""
LOOK_S = 7.0
"""How often a gateway looks whether it writes a pod by now."""
UNCHANGED_S = 300.0
"""What has not changed is written this often: more often than it expires."""
OVERLAP_S = 1.0
"""A writing may lack changes made this shortly before it."""


@dataclass(slots=True)
class _Entry:
    changed_s: float
    due_s: float
    written_s: float = -math.inf
    """When this gateway wrote last."""

    @property
    def is_changed(self) -> bool:
        return self.changed_s > self.written_s - OVERLAP_S


class WritePlan:
    """When this gateway writes each pod. Times are seconds of one clock."""

    def __init__(self, own: Life) -> None:
        self._own = own
        self._entries: dict[PodId, _Entry] = {}

    def changed(self, pods: Iterable[PodId], now_s: float) -> None:
        """Note that something new is assumed about the pods."""
        for pod in pods:
            if (entry := self._entries.get(pod)) is None:
                self._entries[pod] = _Entry(now_s, now_s + WRITE_S)
            else:
                entry.changed_s = now_s

    def wrote(self, pod: PodId, now_s: float) -> None:
        """Note that this gateway wrote all that is assumed about the pod."""
        if (entry := self._entries.get(pod)) is not None:
            entry.written_s, entry.due_s = now_s, now_s + WRITE_S

    def drop(self, pods: Iterable[PodId]) -> None:
        """Forget pods that are gone."""
        for pod in pods:
            self._entries.pop(pod, None)

    def pods(self) -> list[PodId]:
        """Return the pods about which anything is assumed."""
        return list(self._entries)

    def unwritten(self, others: Sequence[Life]) -> list[PodId]:
        """Return the pods that this gateway writes and that have changed since. `others`: the other gateways."""
        return [pod for pod, entry in self._entries.items() if entry.is_changed and self._writes(pod, others)]

    def due(self, now_s: float, others: Sequence[Life]) -> Iterator[PodId]:
        """Yield the pods to be written now."""
        for pod, entry in self._entries.items():
            if now_s < entry.due_s or not (entry.is_changed or now_s >= entry.written_s + UNCHANGED_S):
                continue
            if self._writes(pod, others):
                yield pod
            else:
                entry.due_s = now_s + LOOK_S

    def _writes(self, pod: PodId, others: Sequence[Life]) -> bool:
        name = pod.encode()
        return self._own == max((self._own, *others), key=lambda life: xxh3_64_intdigest(name, life))
