"""Apply what the other gateways report: to the index, through the chooser, and to the load of pods."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.contract.events import Keys
from router.choosing.chooser import Chooser
from router.fleet.pod import Clock, Pod
from router.peer_sync.messages import InFlight, Routed
from router.peer_sync.sent_reports import SentReports
from router.registry.speculative_entries import Run
from router.views.types import PodId

LIVE_S = 1.0
"""A request that went to a pod longer ago than this is one of the past: news takes some milliseconds."""


class PeerReports:
    """A `PeerSink`. `pod_of` returns the pod of an id if it is in the fleet."""

    def __init__(
        self, pod_of: Callable[[PodId], Pod | None], chooser: Chooser, sent_reports: SentReports, *, clock: Clock
    ) -> None:
        self._pod_of = pod_of
        self._chooser = chooser
        self._sent_reports = sent_reports
        self._clock = clock

    def knows(self, pod: PodId) -> bool:
        """See PeerSink. Also False for pods that publish, since gateways do not report on those."""
        return self._pod_of(pod) is not None and self._sent_reports.is_reported(pod)

    def routed(self, event: Routed, at_s: float) -> None:
        """See PeerSink."""
        if (found := self._pod_of(event.pod)) is not None:
            self._chooser.remember(event.pod, event.keys, at_s, self._chooser.taken(found, event))
        self._sent_reports.heard(event, at_s)

    def sent(self, event: Routed | InFlight, request: str, at_s: float) -> None:
        """See PeerSink."""
        if (found := self._pod_of(event.pod)) is not None:
            tokens = {
                "prompt_tokens": event.prompt_tokens,
                "uncached_tokens": event.uncached_tokens,
                "output_tokens": event.output_tokens,
            }
            # A load, and a list of requests in flight, bring requests of the past. They show neither how late news
            # comes nor what the others send now.
            if isinstance(event, Routed) and self._clock() - at_s <= LIVE_S:
                self._chooser.heard(found, request, at_s=at_s, **tokens)
            found.state.sent_elsewhere(request, now_s=at_s, **tokens)

    def began(self, pod: PodId, request: str, at_s: float) -> None:
        """See PeerSink."""
        if (found := self._pod_of(pod)) is not None:
            found.state.began_elsewhere(request, now_s=at_s)

    def finished(self, pod: PodId, request: str, at_s: float) -> None:
        """See PeerSink."""
        if (found := self._pod_of(pod)) is not None:
            found.state.finished_elsewhere(request, now_s=at_s)

    def gone(self, gateway: str) -> None:
        """See PeerSink."""
        self._chooser.gateway_gone(gateway)

    def undone(self, pod: PodId, keys: Keys, used_at_s: float) -> None:
        """See PeerSink."""
        self._chooser.forget_unused(pod, keys, used_at_s)

    def refuted(self, pod: PodId, keys: Keys, held_strides: int, at_s: float) -> None:
        """See PeerSink."""
        self._chooser.refute(pod, keys, held_strides, at_s)

    def forgotten(self, pod: PodId, at_s: float) -> None:
        """See PeerSink."""
        self._chooser.forget(pod, at_s)

    def assume(self, pod: PodId, runs: Sequence[Run]) -> None:
        """See PeerSink."""
        self._chooser.assume(pod, runs, self._clock())

    def assumed(self, pod: PodId) -> Sequence[Run] | None:
        """See PeerSink."""
        return self._chooser.assumed(pod) if self.knows(pod) else None
