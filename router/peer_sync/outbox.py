"""What this gateway has to tell the others: collected as it happens, taken in batches. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from engine.contract.events import Keys
from router.peer_sync.messages import (
    Began,
    Ended,
    Event,
    Forgotten,
    InFlight,
    Life,
    PeerMessage,
    Refuted,
    Routed,
    Undone,
    Wish,
    Written,
)
from router.views.types import PodId

BATCH_BYTES = 64 * 1024
"""A message ends with the event that makes it larger than this."""
BACKLOG_BYTES = 1024 * 1024
"""If more is waiting, it is lost, and all beliefs are written to Redis instead."""
EVENT_BYTES = 28
ROUTED_BYTES = 20
"""Further bytes of a Routed, for the session's id."""
KEY_BYTES = 8
RETOLD_S = 600.0
"""If messages are lost, this gateway tells again which pods were emptied in this many seconds before."""
MAX_NUMBER = 2**32
MAX_LISTED = 16_384
"""The most requests in flight that one message lists; others hear nothing of the rest."""


@dataclass(slots=True)
class _Open:
    """A request in flight."""

    at_s: float
    pod: PodId
    prompt_tokens: int
    uncached_tokens: int
    output_tokens: int
    has_begun: bool = False
    is_told: bool = False
    """Whether its Routed event was taken, or lost."""


class Outbox:
    """Events of this gateway that the others have not been told, oldest first, and its requests in flight.

    Times are seconds of one clock that never goes back. Events that do not fit are lost. Then `has_lost` is true until
    `mend` is called, which happens when all beliefs are written.
    """

    def __init__(self, life: Life, name: str, stride: int, backlog_bytes: int = BACKLOG_BYTES) -> None:
        self.life = life
        self.name = name
        self._stride = stride
        self._backlog_bytes = backlog_bytes
        self._events: deque[tuple[float, Event]] = deque()
        """Each event with its time; the ages in the events are 0."""
        self._size = 0
        self._next_number = 0
        self._seq = 0
        self._open: dict[int, _Open] = {}
        self._lists_in_flight = False
        self.has_lost = False
        self.lost = 0
        """Events lost since the start."""
        self.touched: set[PodId] = set()
        """Pods about which something was told; the publisher empties this."""
        self.forgotten_s: dict[PodId, float] = {}
        """Pod -> when it was last forgotten; the reader removes old entries."""
        self._emptied_s: dict[PodId, float] = {}
        """Pod -> when it was last emptied for certain. `mend` tells this again, because the event may have been
        lost."""
        self._oldest_routed_s: float | None = None
        self.on_first: Callable[[], None] = _nothing
        """Called when an event is added while none was waiting to be taken, and when a Routed event is added while no
        Routed event was waiting."""

    def __len__(self) -> int:
        return len(self._events)

    @property
    def in_flight(self) -> int:
        """Requests that went to a pod and have not ended."""
        return len(self._open)

    @property
    def oldest_s(self) -> float | None:
        """When the oldest event that is not taken was added, or an earlier time."""
        return self._events[0][0] if self._events else None

    @property
    def oldest_routed_s(self) -> float | None:
        """When the oldest Routed event that is not taken was added, or an earlier time; None: there is no such
        event."""
        return self._oldest_routed_s

    def routed(
        self,
        pod: PodId,
        session_id: str,
        keys: Keys,
        now_s: float,
        *,
        prompt_tokens: int,
        uncached_tokens: int,
        output_tokens: int,
    ) -> int:
        """Note that a request goes to a pod. Return its number for the calls that follow."""
        self.touched.add(pod)
        number = self._next_number
        self._next_number = (number + 1) % MAX_NUMBER
        self._open[number] = _Open(now_s, pod, prompt_tokens, uncached_tokens, output_tokens)
        self._add(
            Routed(0.0, number, pod, session_id, keys, prompt_tokens, uncached_tokens, output_tokens),
            now_s,
            ROUTED_BYTES + KEY_BYTES * len(keys),
        )
        if self._oldest_routed_s is None and self._events:
            self._oldest_routed_s = now_s
            self.on_first()
        return number

    def began(self, number: int, now_s: float, cached_tokens: int | None) -> None:
        """Note that the request's first token came. Ignored if the request has begun or ended."""
        request = self._open.get(number)
        if request is not None and not request.has_begun:
            request.has_begun = True
            self._add(Began(0.0, number, cached_tokens), now_s)

    def ended(self, number: int, now_s: float) -> None:
        """Note that the request has left its pod. May be called again."""
        if self._open.pop(number, None) is not None:
            self._add(Ended(0.0, number), now_s)

    def undone(self, pod: PodId, keys: Keys, sent_at_s: float) -> None:
        """Note that a request sent at `sent_at_s` never ran on the pod. `keys`: those that no other request vouches
        for."""
        if keys:
            self.touched.add(pod)
            self._add(Undone(0.0, pod, keys), sent_at_s, KEY_BYTES * len(keys))

    def refuted(self, pod: PodId, keys: Keys, held_strides: int, cached_tokens: int, now_s: float) -> None:
        """Note that the pod had held less than was believed."""
        self.touched.add(pod)
        self._add(Refuted(0.0, pod, keys, held_strides, cached_tokens), now_s, KEY_BYTES * len(keys))

    def forgotten(self, pod: PodId, now_s: float, *, is_sure: bool) -> None:
        """Note that nothing is believed about the pod any more. For `is_sure` see Forgotten."""
        self.touched.add(pod)
        self.forgotten_s[pod] = now_s
        if is_sure:
            self._emptied_s.pop(pod, None)
            self._emptied_s[pod] = now_s
        self._add(Forgotten(0.0, pod, is_sure), now_s)

    def written(
        self, pods: Iterable[PodId], now_s: float, *, is_recovery: bool = False, is_answer: bool = False
    ) -> None:
        """Note that the beliefs about these pods are in Redis. See Written."""
        for pod in pods:
            self._add(Written(0.0, pod, is_recovery, is_answer), now_s)

    def wish(self, life: Life, now_s: float) -> None:
        """Ask the gateway `life` to write what it believes."""
        self._add(Wish(0.0, life), now_s)

    def list_in_flight(self) -> None:
        """Make the next message list all requests in flight."""
        self._lists_in_flight = True

    def mend(self, now_s: float) -> None:
        """Prepare to make good what was lost: the caller writes all beliefs, and this method tells again which pods
        were emptied.

        Otherwise a gateway that did not hear that a pod was emptied would go on believing in its keys.
        """
        self.has_lost = False
        self._lists_in_flight = True
        while self._emptied_s and now_s - (oldest := next(iter(self._emptied_s.items())))[1] > RETOLD_S:
            del self._emptied_s[oldest[0]]
        for pod, at_s in self._emptied_s.items():
            self._add(Forgotten(0.0, pod, True), at_s)

    def take(self, now_s: float, *, is_last: bool = False) -> PeerMessage:
        """Return the next message, with as many events as fit. Without events it only shows that this gateway
        runs."""
        self._seq += 1
        events: list[Event] = []
        lists_in_flight, self._lists_in_flight = self._lists_in_flight, False
        if lists_in_flight:
            events = [
                InFlight(
                    max(0.0, now_s - request.at_s),
                    number,
                    request.pod,
                    request.prompt_tokens,
                    request.uncached_tokens,
                    request.output_tokens,
                    request.has_begun,
                )
                for number, request in islice(self._open.items(), MAX_LISTED)
                if request.is_told
            ]
        size = 0
        while self._events and size < BATCH_BYTES:
            at_s, event = self._events.popleft()
            size += _size(event)
            if isinstance(event, Routed) and (request := self._open.get(event.number)) is not None:
                request.is_told = True
            events.append(event._replace(age_s=max(0.0, now_s - at_s)))
        self._size -= size
        self._oldest_routed_s = self.oldest_s  # events that are left are as urgent as a Routed
        return PeerMessage(
            self.life,
            self.name,
            self._seq,
            self._stride,
            tuple(events),
            lists_in_flight=lists_in_flight,
            is_last=is_last,
        )

    def _add(self, event: Event, now_s: float, further_bytes: int = 0) -> None:
        size = EVENT_BYTES + further_bytes
        if self._size + size > self._backlog_bytes:
            self._lose()
            return
        self._size += size
        self._events.append((now_s, event))
        if len(self._events) == 1:
            self.on_first()

    def _lose(self) -> None:
        """Drop all events because one does not fit: the others are of no use without it. All beliefs are written
        instead."""
        self.lost += 1 + len(self._events)
        self._events.clear()
        self._oldest_routed_s = None
        self._size = 0
        self.has_lost = True
        for request in self._open.values():
            request.is_told = True


def _size(event: Event) -> int:
    """Return the most bytes that the event takes in a message, without its pod's name."""
    if isinstance(event, Routed):
        return EVENT_BYTES + ROUTED_BYTES + KEY_BYTES * len(event.keys)
    if isinstance(event, Undone | Refuted):
        return EVENT_BYTES + KEY_BYTES * len(event.keys)
    return EVENT_BYTES


def _nothing() -> None:
    """Do nothing: the publisher has not registered its callback yet."""
