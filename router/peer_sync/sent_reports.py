"""Report to listeners and the other gateways what this gateway sends to pods that publish nothing."""

from __future__ import annotations

from collections.abc import Callable

from engine.contract.events import Keys
from router.fleet.pod import Clock
from router.peer_sync.messages import OnRouted, Routed
from router.peer_sync.outbox import Outbox
from router.views.types import PodId


class SentReport:
    """Reports one request on its pod to listeners and other gateways."""

    __slots__ = ("_routed", "_sent_reports", "_sent_s")

    def __init__(self, sent_reports: SentReports, routed: Routed) -> None:
        self._sent_reports = sent_reports
        self._routed = routed
        self._sent_s: float | None = None

    def sent(self) -> None:
        """Report that the request is sent to the pod."""
        self._sent_s = self._sent_reports.clock()
        self._sent_reports.heard(self._routed, self._sent_s)
        if (outbox := self._sent_reports.outbox) is not None:
            outbox.routed(self._routed, self._sent_s)

    def began(self, cached_tokens: int | None) -> None:
        """Report that the first token came."""
        if (outbox := self._sent_reports.outbox) is not None:
            outbox.began(self._routed.number, self._sent_reports.clock(), cached_tokens)

    def ended(self) -> None:
        """Report that the request has left the pod."""
        if (outbox := self._sent_reports.outbox) is not None:
            outbox.ended(self._routed.number, self._sent_reports.clock())

    def undone(self, keys: Keys) -> None:
        """Report that the request never ran, so the pod no longer counts as holding `keys`."""
        if (outbox := self._sent_reports.outbox) is not None and self._sent_s is not None:
            outbox.undone(self._routed.pod, keys, self._sent_s)


class SentReports:
    """Reports requests. `publishes`: whether a pod reports to the registry itself, so that gateways need not do so."""

    def __init__(self, publishes: Callable[[PodId], bool], outbox: Outbox | None, clock: Clock) -> None:
        """`outbox`: None if there are no other gateways to tell."""
        self._publishes = publishes
        self.outbox = outbox
        self.clock = clock
        self._listeners: list[OnRouted] = []

    def listen(self, listener: OnRouted) -> None:
        """Call `listener` with each request that this or another gateway sends to a pod that publishes nothing."""
        self._listeners.append(listener)

    def is_reported(self, pod: PodId) -> bool:
        """Whether gateways tell each other about the pod."""
        return not self._publishes(pod)

    def heard(self, routed: Routed, at_s: float) -> None:
        """Tell the listeners that this or another gateway sends a request to a pod."""
        for listener in self._listeners:
            listener(routed.pod, routed.session_id, routed.keys, routed.prompt_tokens, at_s)

    def next_number(self) -> int:
        """Return the number for the Routed event of a request."""
        return 0 if self.outbox is None else self.outbox.next_number()

    def of(self, routed: Routed) -> SentReport | None:
        """Return the reporter of a request that is about to go to a pod; None if nobody needs reports on that pod."""
        if self._publishes(routed.pod) or (self.outbox is None and not self._listeners):
            return None
        return SentReport(self, routed)

    def refuted(self, pod: PodId, keys: Keys, held_strides: int, cached_tokens: int) -> None:
        """Report that the pod had held less than the index said, as an answer showed."""
        if self.outbox is not None and not self._publishes(pod):
            self.outbox.refuted(pod, keys, held_strides, cached_tokens, self.clock())

    def forgotten(self, pod: PodId, *, is_sure: bool) -> None:
        """Report that all keys of the pod are dropped: its cache was emptied (`is_sure`), or the pod has restarted."""
        if self.outbox is not None and not self._publishes(pod):
            self.outbox.forgotten(pod, self.clock(), is_sure=is_sure)
