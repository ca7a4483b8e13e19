"""Apply what the other gateways report: to the index, through the chooser, and to the load of pods."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.contract.events import Keys
from router.choosing.chooser import Chooser
from router.fleet.pod import Clock, Pod
from router.peer_sync.beliefs import Routed
from router.peer_sync.sent_reports import Telling
from router.registry.speculation import Run
from router.views.types import PodId


class Hearsay:
    """A `BeliefSink`. `pod_of` returns the pod of an id if it is in the fleet."""

    def __init__(
        self, pod_of: Callable[[PodId], Pod | None], chooser: Chooser, telling: Telling, *, clock: Clock
    ) -> None:
        self._pod_of = pod_of
        self._chooser = chooser
        self._telling = telling
        self._clock = clock

    def knows(self, pod: PodId) -> bool:
        """See BeliefSink. Also False for pods that publish, since gateways do not report on those."""
        return self._pod_of(pod) is not None and self._telling.is_told(pod)

    def routed(self, event: Routed, at_s: float) -> None:
        """See BeliefSink."""
        if (found := self._pod_of(event.pod)) is not None:
            self._chooser.remember(event.pod, event.keys, at_s, self._chooser.taken(found, event))
        self._telling.heard(event.pod, event.session_id, event.keys, event.prompt_tokens, at_s)

    def sent(
        self, pod: PodId, request: str, *, prompt_tokens: int, uncached_tokens: int, output_tokens: int, at_s: float
    ) -> None:
        """See BeliefSink."""
        if (found := self._pod_of(pod)) is not None:
            self._chooser.heard(
                found,
                request,
                prompt_tokens=prompt_tokens,
                uncached_tokens=uncached_tokens,
                output_tokens=output_tokens,
                at_s=at_s,
            )
            found.state.sent_elsewhere(
                request,
                prompt_tokens=prompt_tokens,
                uncached_tokens=uncached_tokens,
                output_tokens=output_tokens,
                now_s=at_s,
            )

    def began(self, pod: PodId, request: str, at_s: float) -> None:
        """See BeliefSink."""
        if (found := self._pod_of(pod)) is not None:
            found.state.began_elsewhere(request, now_s=at_s)

    def finished(self, pod: PodId, request: str, at_s: float) -> None:
        """See BeliefSink."""
        if (found := self._pod_of(pod)) is not None:
            found.state.finished_elsewhere(request, now_s=at_s)

    def undone(self, pod: PodId, keys: Keys, used_at_s: float) -> None:
        """See BeliefSink."""
        self._chooser.unbelieve(pod, keys, used_at_s)

    def refuted(self, pod: PodId, keys: Keys, held_strides: int, at_s: float) -> None:
        """See BeliefSink."""
        self._chooser.refute(pod, keys, held_strides, at_s)

    def forgotten(self, pod: PodId, at_s: float) -> None:
        """See BeliefSink."""
        self._chooser.forget(pod, at_s)

    def believe(self, pod: PodId, runs: Sequence[Run]) -> None:
        """See BeliefSink."""
        self._chooser.believe(pod, runs, self._clock())

    def believed(self, pod: PodId) -> Sequence[Run] | None:
        """See BeliefSink."""
        return self._chooser.believed(pod) if self.knows(pod) else None
