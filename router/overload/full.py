"""Which of a model's pods have as many requests as they take, kept current from one look (a call of `at`) to the next.

A pod becomes full only when something happens to it: a request is sent, a report comes, a cap is learnt. Time alone can
only make it free again: a learnt cap grows, and an old report counts less. So a look asks only the pods to which
something has happened since the last look, and those that were full then.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.overload.saturation import Cap, Place, is_full
from router.views.pod_state import PodState
from router.views.types import PodId

NO_PODS: frozenset[PodId] = frozenset()


class FullPods:
    """The full pods among those last given. A look's cost depends on what changed and what is full, not on all pods."""

    __slots__ = ("_busy", "_full", "_learnt", "_most", "_of_cap", "_of_state", "_pods", "_set")

    def __init__(self, most: int) -> None:
        """`most`: requests that every pod gets at most; 0: as many as it takes."""
        self._most = most
        self._pods: Sequence[Place] = ()
        self._of_cap: dict[Cap, Place] = {}
        self._of_state: dict[PodState, Place] = {}
        """Pods that have a bound; the others are not watched."""
        self._learnt: set[Cap] = set()
        """Caps that have changed since the last look."""
        self._busy: set[PodState] = set()
        """Pods with a bound to which something has happened since the last look."""
        self._full: dict[PodState, Place] = {}
        self._set = NO_PODS

    def at(self, pods: Sequence[Place], now_s: float) -> frozenset[PodId]:
        """Return the full pods of `pods`. A given sequence must never change; `now_s` must never go back."""
        if pods is not self._pods:
            self._follow(pods)
        if self._learnt:
            for cap in self._learnt:
                self._bound(self._of_cap[cap])
            self._learnt.clear()
        if self._busy:
            self._look(now_s)
        if self._full:
            most = self._most
            free = [state for state, pod in self._full.items() if not is_full(pod, most, now_s)]
            if free:
                for state in free:
                    del self._full[state]
                self._set = self._ids()
        return self._set

    def _look(self, now_s: float) -> None:
        """Look at the pods to which something has happened."""
        full, before = self._full, len(self._full)
        is_other = False
        for state in self._busy:
            pod = self._of_state[state]
            if not is_full(pod, self._most, now_s):
                full.pop(state, None)
            elif state not in full:
                full[state] = pod
                is_other = True
        self._busy.clear()
        if is_other or len(full) != before:
            self._set = self._ids()

    def _ids(self) -> frozenset[PodId]:
        return frozenset([pod.pod_id for pod in self._full.values()]) if self._full else NO_PODS

    def _follow(self, pods: Sequence[Place]) -> None:
        """Use these pods from now on."""
        self._pods = pods
        wanted = {pod.cap: pod for pod in pods}
        for cap in self._of_cap.keys() - wanted.keys():
            self._forget(self._of_cap.pop(cap))
        for cap in wanted.keys() - self._of_cap.keys():
            self._of_cap[cap] = wanted[cap]
            cap.watch(self._learnt)
            if self._most or cap.is_known:
                self._bound(wanted[cap])

    def _bound(self, pod: Place) -> None:
        """Watch a pod that has a bound from now on."""
        if pod.state not in self._of_state:
            self._of_state[pod.state] = pod
            pod.state.watch(self._busy)
        self._busy.add(pod.state)

    def _forget(self, pod: Place) -> None:
        pod.cap.unwatch(self._learnt)
        self._learnt.discard(pod.cap)
        if self._of_state.pop(pod.state, None) is not None:
            pod.state.unwatch(self._busy)
            self._busy.discard(pod.state)
            if self._full.pop(pod.state, None) is not None:
                self._set = self._ids()
