"""Report to listeners and the other gateways what this gateway sends to pods that publish nothing."""

from __future__ import annotations

from collections.abc import Callable

from engine.contract.events import Keys
from router.fleet.pod import Clock
from router.peer_sync.messages import OnRouted
from router.peer_sync.outbox import Outbox
from router.views.types import PodId


class SentReport:
    """Reports one request on its pod to listeners and other gateways."""

    __slots__ = (
        "_keys",
        "_number",
        "_output_tokens",
        "_pod",
        "_prompt_tokens",
        "_sent_reports",
        "_sent_s",
        "_session_id",
        "_uncached_tokens",
    )

    def __init__(
        self,
        sent_reports: SentReports,
        pod: PodId,
        session_id: str,
        keys: Keys,
        prompt_tokens: int,
        uncached_tokens: int,
        output_tokens: int,
    ) -> None:
        self._sent_reports = sent_reports
        self._pod = pod
        self._session_id = session_id
        self._keys = keys
        self._prompt_tokens = prompt_tokens
        self._uncached_tokens = uncached_tokens
        self._output_tokens = output_tokens
        self._number = -1
        self._sent_s = 0.0

    def sent(self) -> None:
        """Report that the request is sent to the pod."""
        sent_reports = self._sent_reports
        now_s = self._sent_s = sent_reports.clock()
        sent_reports.heard(self._pod, self._session_id, self._keys, self._prompt_tokens, now_s)
        if sent_reports.outbox is not None:
            self._number = sent_reports.outbox.routed(
                self._pod,
                self._session_id,
                self._keys,
                now_s,
                prompt_tokens=self._prompt_tokens,
                uncached_tokens=self._uncached_tokens,
                output_tokens=self._output_tokens,
            )

    def began(self, cached_tokens: int | None) -> None:
        """Report that the first token came."""
        if self._sent_reports.outbox is not None:
            self._sent_reports.outbox.began(self._number, self._sent_reports.clock(), cached_tokens)

    def ended(self) -> None:
        """Report that the request has left the pod."""
        if self._sent_reports.outbox is not None:
            self._sent_reports.outbox.ended(self._number, self._sent_reports.clock())

    def undone(self, keys: Keys) -> None:
        """Report that the request never ran, so the pod no longer counts as holding `keys`."""
        if self._sent_reports.outbox is not None and self._number >= 0:
            self._sent_reports.outbox.undone(self._pod, keys, self._sent_s)


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

    def is_told(self, pod: PodId) -> bool:
        """Whether gateways tell each other about the pod."""
        return not self._publishes(pod)

    def heard(self, pod: PodId, session_id: str, keys: Keys, prompt_tokens: int, at_s: float) -> None:
        """Tell the listeners that this or another gateway sends a request to a pod."""
        for listener in self._listeners:
            listener(pod, session_id, keys, prompt_tokens, at_s)

    def of(
        self,
        pod: PodId,
        session_id: str,
        keys: Keys,
        *,
        prompt_tokens: int,
        uncached_tokens: int,
        output_tokens: int,
    ) -> SentReport | None:
        """Return the reporter of a request that is about to go to a pod; None if nobody needs reports on that pod."""
        if self._publishes(pod) or (self.outbox is None and not self._listeners):
            return None
        return SentReport(self, pod, session_id, keys, prompt_tokens, uncached_tokens, output_tokens)

    def refuted(self, pod: PodId, keys: Keys, held_strides: int, cached_tokens: int) -> None:
        """Report that the pod had held less than the index said, as an answer showed."""
        if self.outbox is not None and not self._publishes(pod):
            self.outbox.refuted(pod, keys, held_strides, cached_tokens, self.clock())

    def forgotten(self, pod: PodId, *, is_sure: bool) -> None:
        """Report that all keys of the pod are dropped: its cache was emptied (`is_sure`), or the pod has restarted."""
        if self.outbox is not None and not self._publishes(pod):
            self.outbox.forgotten(pod, self.clock(), is_sure=is_sure)
