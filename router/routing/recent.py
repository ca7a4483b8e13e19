"""Each pod's recent work and last turn: they settle which of several equally good pods takes a request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from router.views.types import PodId

_PODS = 4096
_RESCALE_AT = 2.0**40


class _Numbers:
    """A number for each pod, 0 at first. An array holds the same numbers for the pods last asked for."""

    def __init__(self) -> None:
        self.by_pod: dict[PodId, float] = {}
        """The pod whose number is unchanged for longest comes first."""
        self._ids: Sequence[PodId] = ()
        self._rows: dict[PodId, int] = {}
        self._array = np.zeros(0)

    def array(self, ids: Sequence[PodId]) -> NDArray[np.float64]:
        """Return the numbers of `ids`, in order; do not change the array. Fast if `ids` is the same object again."""
        if ids is not self._ids:
            self._ids, self._rows = ids, {pod_id: i for i, pod_id in enumerate(ids)}
            self._array = np.array([self.by_pod.get(pod_id, 0.0) for pod_id in ids])
        return self._array

    def set(self, pod_id: PodId, number: float) -> None:
        """Change a pod's number. Beyond `_PODS` pods the number unchanged for longest is forgotten."""
        self.by_pod.pop(pod_id, None)
        self.by_pod[pod_id] = number
        self._show(pod_id, number)
        if len(self.by_pod) > _PODS:
            forgotten = next(iter(self.by_pod))
            del self.by_pod[forgotten]
            self._show(forgotten, 0.0)

    def divide(self, by: float) -> None:
        """Divide every number."""
        self.by_pod = {pod_id: number / by for pod_id, number in self.by_pod.items()}
        self._array /= by

    def _show(self, pod_id: PodId, number: float) -> None:
        row = self._rows.get(pod_id)
        if row is not None:
            self._array[row] = number


class RecentWork:
    """Tokens of work sent to each pod; they halve every `half_life_s`."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._sent = _Numbers()
        """In units that grow as work decays, so that nothing is touched while time passes."""
        self._origin_s = 0.0

    def tokens(self, pod_id: PodId, now_s: float) -> float:
        """Decayed tokens sent to the pod."""
        return self._sent.by_pod.get(pod_id, 0.0) / self._unit(now_s)

    def all_tokens(self, ids: Sequence[PodId], now_s: float) -> NDArray[np.float64]:
        """`tokens` of each of `ids`."""
        tokens: NDArray[np.float64] = self._sent.array(ids) / self._unit(now_s)
        return tokens

    def ranks(self, ids: Sequence[PodId]) -> NDArray[np.float64]:
        """Return for each of `ids` a number that grows with recent work; numbers are comparable until the next
        `add`."""
        return self._sent.array(ids)

    def add(self, pod_id: PodId, tokens: float, now_s: float) -> None:
        """Count work sent to the pod."""
        unit = self._unit(now_s)
        if unit > _RESCALE_AT:
            self._sent.divide(unit)
            self._origin_s, unit = now_s, 1.0
        self._sent.set(pod_id, self._sent.by_pod.get(pod_id, 0.0) + tokens * unit)

    def _unit(self, now_s: float) -> float:
        return float(2.0 ** min((now_s - self._origin_s) / self._half_life_s, 1000.0))


class Turns:
    """The order in which pods were last chosen."""

    def __init__(self) -> None:
        self._taken = _Numbers()
        self._count = 0

    def last(self, pod_id: PodId) -> float:
        """Return the number of the pod's last turn, greater if later; 0: it had none."""
        return self._taken.by_pod.get(pod_id, 0.0)

    def lasts(self, ids: Sequence[PodId]) -> NDArray[np.float64]:
        """`last` of each of `ids`."""
        return self._taken.array(ids)

    def take(self, pod_id: PodId) -> None:
        """Give the pod the latest turn."""
        self._count += 1
        self._taken.set(pod_id, float(self._count))
