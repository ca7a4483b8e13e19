"""What this gateway has to tell the others: collected as it happens, taken in batches. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from engine.contract.events import Keys
from router.peer_sync.messages import (
    Ask,
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
)
from router.views.types import PodId

BATCH_BYTES = 64 * 1024
"""A message ends with the event that makes it larger than this."""
BACKLOG_BYTES = 1024 * 1024
"""If more is waiting, it is lost, and this gateway sends all that it assumes instead."""
EVENT_BYTES = 64
"""Most bytes of an event without its keys: a Routed, with its session's id, is the longest."""
KEY_BYTES = 8
RETOLD_S = 600.0
"""If messages are lost, this gateway tells again which pods were emptied in this many seconds before."""
MAX_LISTED = 16_384
"""The most requests in flight that one message lists; others hear nothing of the rest."""


@dataclass(slots=True)
class _Open:
    """A request in flight."""

    at_s: float
    routed: Routed
    has_begun: bool = False
    is_told: bool = False
    """Whether its Routed event was taken, or lost."""


class Outbox:
    """Events of this gateway that the others have not been told, oldest first, and its requests in flight.

    Times are seconds of one clock that never goes back. Events that do not fit are lost. Then, and if another gateway
    has missed something, `resend_at_s` says when to send all that this gateway assumes.
    """

    def __init__(self, life: Life, name: str, stride: int, backlog_bytes: int = BACKLOG_BYTES) -> None:
        self.life = life
        self.name = name
        self.stride = stride
        self._backlog_bytes = backlog_bytes
        self._events: deque[tuple[float, Event]] = deque()
        """Each event with its time; the ages in the events are 0."""
        self._size = 0
        self._next_number = 0
        self._seq = 0
        self._open: dict[int, _Open] = {}
        self._lists_in_flight = False
        self.resend_at_s = math.inf
        self.lost = 0
        """Events lost since the start."""
        self.touched: set[PodId] = set()
        """Pods about which something was told; the sender empties this."""
        self.forgotten_s: dict[PodId, float] = {}
        """Pod -> when it was last forgotten; the reader removes old entries."""
        self._emptied_s: dict[PodId, float] = {}
        """Pod -> when it was last emptied for certain, the oldest first."""
        self._oldest_routed_s: float | None = None
        self.on_first: Callable[[], None] = lambda: None
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

    def next_number(self) -> int:
        """Return a number for a request, for its Routed event and the calls that follow."""
        number = self._next_number
        self._next_number = (number + 1) % 2**32
        return number

    def routed(self, event: Routed, now_s: float) -> None:
        """Note that a request goes to a pod. `event.number`: from `next_number`."""
        self.touched.add(event.pod)
        self._open[event.number] = _Open(now_s, event)
        self._add(event, now_s, event.keys)
        if self._oldest_routed_s is None and self._events:
            self._oldest_routed_s = now_s
            self.on_first()

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
            self._add(Undone(0.0, pod, keys), sent_at_s, keys)

    def refuted(self, pod: PodId, keys: Keys, held_strides: int, cached_tokens: int, now_s: float) -> None:
        """Note that the pod had held less than was assumed."""
        self.touched.add(pod)
        self._add(Refuted(0.0, pod, keys, held_strides, cached_tokens), now_s, keys)

    def forgotten(self, pod: PodId, now_s: float, *, is_sure: bool) -> None:
        """Note that nothing is assumed about the pod any more. For `is_sure` see Forgotten."""
        self.touched.add(pod)
        self.forgotten_s[pod] = now_s
        if is_sure:
            self._emptied_s.pop(pod, None)
            self._emptied_s[pod] = now_s
        self._add(Forgotten(0.0, pod, is_sure), now_s)

    def ask(self, life: Life, now_s: float) -> None:
        """Ask the gateway `life` for all that it assumes."""
        self._add(Ask(0.0, life), now_s)

    def next_seq(self) -> int:
        """Return the number of the next message."""
        self._seq += 1
        return self._seq

    def begin_resending(self, now_s: float) -> None:
        """Prepare to make good what was missed, before the caller sends all that it assumes: list what is in flight,
        and tell again which pods were emptied. A gateway that did not hear that would go on assuming their keys."""
        self.resend_at_s = math.inf
        self._lists_in_flight = True
        while self._emptied_s and now_s - (oldest := next(iter(self._emptied_s.items())))[1] > RETOLD_S:
            del self._emptied_s[oldest[0]]
        for pod, at_s in self._emptied_s.items():
            self._add(Forgotten(0.0, pod, True), at_s)

    def list_in_flight(self) -> None:
        """Make the next message list all requests in flight."""
        self._lists_in_flight = True

    def take(self, now_s: float, *, is_last: bool = False) -> PeerMessage:
        """Return the next message, with as many events as fit. Without events it only shows that this gateway
        runs."""
        events: list[Event] = []
        lists_in_flight, self._lists_in_flight = self._lists_in_flight, False
        if lists_in_flight:
            for number, request in islice(self._open.items(), MAX_LISTED):
                if request.is_told:
                    sent = request.routed
                    tokens = sent.prompt_tokens, sent.uncached_tokens, sent.output_tokens
                    age_s = max(0.0, now_s - request.at_s)
                    events.append(InFlight(age_s, number, sent.pod, *tokens, request.has_begun))
        size = 0
        while self._events and size < BATCH_BYTES:
            at_s, event = self._events.popleft()
            size += _size(event)
            if isinstance(event, Routed) and (told := self._open.get(event.number)) is not None:
                told.is_told = True
            older: Any = type(event)  # `_replace` takes twice as long
            events.append(older(max(0.0, now_s - at_s), *event[1:]))
        self._size -= size
        self._oldest_routed_s = self.oldest_s  # events that are left are as urgent as a Routed
        return PeerMessage(
            self.life,
            self.name,
            self.next_seq(),
            self.stride,
            tuple(events),
            lists_in_flight=lists_in_flight,
            is_last=is_last,
        )

    def _add(self, event: Event, now_s: float, keys: Keys = ()) -> None:
        size = EVENT_BYTES + KEY_BYTES * len(keys)
        if self._size + size > self._backlog_bytes:
            self._lose(now_s)
            return
        self._size += size
        self._events.append((now_s, event))
        if len(self._events) == 1:
            self.on_first()

    def _lose(self, now_s: float) -> None:
        """Drop all events because one does not fit: the others are of no use without it."""
        self.lost += 1 + len(self._events)
        self._events.clear()
        self._oldest_routed_s = None
        self._size = 0
        self.resend_at_s = now_s
        for request in self._open.values():
            request.is_told = True


def _size(event: Event) -> int:
    """Return what `_add` counted for the event."""
    keys = event.keys if isinstance(event, Routed | Undone | Refuted) else ()
    return EVENT_BYTES + KEY_BYTES * len(keys)
