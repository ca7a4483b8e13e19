"""What this gateway has to tell the others: gathered as it happens, taken in batches. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from engine.contract.events import Keys
from router.registry.beliefs import (
    Aboard,
    Began,
    BeliefMessage,
    Ended,
    Event,
    Forgotten,
    Life,
    Refuted,
    Routed,
    Undone,
    Wish,
    Written,
)
from router.routing.types import PodId

BATCH_BYTES = 64 * 1024
"""A message ends with the event that takes it beyond this."""
BACKLOG_BYTES = 1024 * 1024
"""More than this is not kept: it is lost, and what is believed is written whole."""
EVENT_BYTES = 28
ROUTED_BYTES = 20
"""Further ones, for the session's id."""
KEY_BYTES = 8
RETOLD_S = 600.0
"""That a pod was emptied is told again for so long, if messages are lost."""
MAX_NUMBER = 2**32
MAX_ABOARD = 16_384
"""Requests that one message lists as in flight; of more the others hear too little."""


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
    """Its Routed was taken, or lost."""


class Notebook:
    """Events of this gateway that others have not been told, oldest first, and its requests in flight.

    Times are seconds of one clock that never goes back. What does not fit is lost: `has_lost` is true from then on
    until `mend` is called, when all that is believed has been written.
    """

    def __init__(self, life: Life, name: str, stride: int, backlog_bytes: int = BACKLOG_BYTES) -> None:
        self.life = life
        self.name = name
        self._stride = stride
        self._backlog_bytes = backlog_bytes
        self._events: deque[tuple[float, Event]] = deque()
        """With the time of each; the ages in them are 0."""
        self._size = 0
        self._next_number = 0
        self._seq = 0
        self._open: dict[int, _Open] = {}
        self._lists_aboard = False
        self.has_lost = False
        self.lost = 0
        """Events that were lost, of all time."""
        self.touched: set[PodId] = set()
        """Pods of which something was told; for the publisher to empty."""
        self.forgotten_s: dict[PodId, float] = {}
        """When a pod was last forgotten; for the reader to prune."""
        self._emptied_s: dict[PodId, float] = {}
        """When a pod was last emptied for sure: what was lost may have told of it."""
        self._oldest_routed_s: float | None = None
        self.on_first: Callable[[], None] = _nothing
        """Called when there is something to tell after there was nothing, and where a request went after there was no
        such thing."""

    def __len__(self) -> int:
        return len(self._events)

    @property
    def in_flight(self) -> int:
        """Requests that were told of and have not ended."""
        return len(self._open)

    @property
    def oldest_s(self) -> float | None:
        """When the first event that is not taken came, or before."""
        return self._events[0][0] if self._events else None

    @property
    def oldest_routed_s(self) -> float | None:
        """When the first request went to its pod of which that is not taken, or before; None: there is none."""
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
        """A request goes to a pod; its number, for what follows."""
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
        """Its first token came. Ignored for one that has begun or ended."""
        request = self._open.get(number)
        if request is not None and not request.has_begun:
            request.has_begun = True
            self._add(Began(0.0, number, cached_tokens), now_s)

    def ended(self, number: int, now_s: float) -> None:
        """It has left its pod. May be called again."""
        if self._open.pop(number, None) is not None:
            self._add(Ended(0.0, number), now_s)

    def undone(self, pod: PodId, keys: Keys, sent_at_s: float) -> None:
        """A request that was sent then never ran there; its keys that no other request vouched for."""
        if keys:
            self.touched.add(pod)
            self._add(Undone(0.0, pod, keys), sent_at_s, KEY_BYTES * len(keys))

    def refuted(self, pod: PodId, keys: Keys, held_strides: int, cached_tokens: int, now_s: float) -> None:
        """The pod had held less than was believed."""
        self.touched.add(pod)
        self._add(Refuted(0.0, pod, keys, held_strides, cached_tokens), now_s, KEY_BYTES * len(keys))

    def forgotten(self, pod: PodId, now_s: float, *, is_sure: bool) -> None:
        """Nothing is believed of the pod any more."""
        self.touched.add(pod)
        self.forgotten_s[pod] = now_s
        if is_sure:
            self._emptied_s.pop(pod, None)
            self._emptied_s[pod] = now_s
        self._add(Forgotten(0.0, pod, is_sure), now_s)

    def written(
        self, pods: Iterable[PodId], now_s: float, *, is_recovery: bool = False, is_answer: bool = False
    ) -> None:
        """What is believed of these pods lies in Redis. See Written."""
        for pod in pods:
            self._add(Written(0.0, pod, is_recovery, is_answer), now_s)

    def wish(self, life: Life, now_s: float) -> None:
        """Ask that gateway to write what it believes."""
        self._add(Wish(0.0, life), now_s)

    def list_aboard(self) -> None:
        """Have the next message list all requests in flight."""
        self._lists_aboard = True

    def mend(self, now_s: float) -> None:
        """What was lost is about to be made good: what is believed is written, and what is not any more is told again.

        Without that, a gateway that did not hear of an emptied pod would go on believing in it.
        """
        self.has_lost = False
        self._lists_aboard = True
        while self._emptied_s and now_s - (oldest := next(iter(self._emptied_s.items())))[1] > RETOLD_S:
            del self._emptied_s[oldest[0]]
        for pod, at_s in self._emptied_s.items():
            self._add(Forgotten(0.0, pod, True), at_s)

    def take(self, now_s: float, *, is_last: bool = False) -> BeliefMessage:
        """The next message, with as many events as it holds; of none it shows that this gateway lives."""
        self._seq += 1
        events: list[Event] = []
        lists_aboard, self._lists_aboard = self._lists_aboard, False
        if lists_aboard:
            events = [
                Aboard(
                    max(0.0, now_s - request.at_s),
                    number,
                    request.pod,
                    request.prompt_tokens,
                    request.uncached_tokens,
                    request.output_tokens,
                    request.has_begun,
                )
                for number, request in islice(self._open.items(), MAX_ABOARD)
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
        self._oldest_routed_s = self.oldest_s  # where some are left, they are told as soon as the way of a request
        return BeliefMessage(
            self.life, self.name, self._seq, self._stride, tuple(events), lists_aboard=lists_aboard, is_last=is_last
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
        """An event for which there is no room makes those before it of no use: what is believed is written whole."""
        self.lost += 1 + len(self._events)
        self._events.clear()
        self._oldest_routed_s = None
        self._size = 0
        self.has_lost = True
        for request in self._open.values():
            request.is_told = True


def _size(event: Event) -> int:
    """Bytes of the event in a message, at most, but for its pod's name."""
    if isinstance(event, Routed):
        return EVENT_BYTES + ROUTED_BYTES + KEY_BYTES * len(event.keys)
    if isinstance(event, Undone | Refuted):
        return EVENT_BYTES + KEY_BYTES * len(event.keys)
    return EVENT_BYTES


def _nothing() -> None:
    """Nobody waits for what is to be told."""
