"""What the other gateways have told: which of them live, what each has in flight, what the index gets of it. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from router.registry.beliefs import (
    ANY_LIFE,
    Aboard,
    Began,
    BeliefMessage,
    BeliefSink,
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

LEASE_S = 7.0
"""What a gateway that is silent for so long had in flight does not count any more: three heartbeats."""
FORGET_S = 600.0
"""One that is silent for so long is forgotten: should it be heard again, it counts as new."""
SAME_S = 0.01
"""Times of one event that two messages tell differ by less: Redis counts milliseconds."""
MAX_GATEWAYS = 1024
MAX_IN_FLIGHT = 65_536
"""Requests of one gateway that count."""


@dataclass(slots=True)
class Other:
    """One gateway. Times are seconds of this process's clock."""

    life: Life
    name: str
    seq: int
    heard_at_s: float
    in_flight: dict[int, PodId] = field(default_factory=dict)
    """By number."""


@dataclass(slots=True)
class Heard:
    """What a message has to do with its reader, beside what the sink was told."""

    is_news: bool = True
    """False: it was heard before."""
    is_gap: bool = False
    """Messages before it are missing."""
    written: list[PodId] = field(default_factory=list)
    """Pods of which beliefs lie in Redis now ..."""
    recovered: list[PodId] = field(default_factory=list)
    """... and of these, those of which its sender could not tell everything ..."""
    answered: list[PodId] = field(default_factory=list)
    """... or others told more in answer to that."""
    is_wished: bool = False
    """Any gateway is to write what it believes."""
    is_missed: bool = False
    """Somebody did not hear what this gateway told."""
    forgotten_s: dict[PodId, float] = field(default_factory=dict)
    """Pods that were emptied, and when."""
    changed: set[PodId] = field(default_factory=set)
    """Pods of which something else is believed now."""


_NOBODY = Other(ANY_LIFE, "", 0, 0.0)


class Others:
    """The other gateways, as far as heard. Messages are given in the order of their stream."""

    def __init__(self, sink: BeliefSink, own: Life) -> None:
        self._sink = sink
        self._own = own
        self._gateways: dict[Life, Other] = {}

    def __len__(self) -> int:
        return len(self._gateways)

    def gateways(self) -> list[Other]:
        """Those that were heard within FORGET_S and have not said goodbye, in the order of becoming known."""
        return list(self._gateways.values())

    def in_flight(self) -> Counter[PodId]:
        """Requests of others, by pod. Takes time in all of them: for operators."""
        counts: Counter[PodId] = Counter()
        for other in self._gateways.values():
            counts.update(other.in_flight.values())
        return counts

    def apply(
        self,
        message: BeliefMessage,
        sent_at_s: float,
        now_s: float,
        fresh: Container[PodId] = frozenset(),
        *,
        is_past: bool = False,
    ) -> Heard:
        """Take up a message, sent at `sent_at_s` of this process's clock, which may be a while ago.

        `fresh`: pods of which nothing was known when it was sent; so others have to say when they restarted. `is_past`:
        it was sent before this gateway listened, so what is missing before it was loaded.
        """
        sent_at_s = min(sent_at_s, now_s)
        heard = Heard()
        if message.life == self._own:
            heard.is_news = False
            for event in message.events:  # what was loaded meanwhile may be from before it
                if isinstance(event, Undone):
                    self._take(_NOBODY, event, sent_at_s - event.age_s, Heard(), fresh)
            return heard
        other = self._gateways.get(message.life)
        if other is None:
            self._make_room()
            other = self._gateways[message.life] = Other(message.life, message.name, message.seq, sent_at_s)
            heard.is_gap = message.seq > 1 and not is_past
        elif message.seq <= other.seq:
            heard.is_news = False
            return heard
        else:
            heard.is_gap = message.seq > other.seq + 1
            other.seq, other.heard_at_s = message.seq, sent_at_s
        if message.lists_aboard:
            listed = {event.number for event in message.events if isinstance(event, Aboard)}
            self._finish(other, other.in_flight.keys() - listed, now_s)
        for event in message.events:
            self._take(other, event, sent_at_s - event.age_s, heard, fresh)
        if message.is_last:
            self._finish(other, list(other.in_flight), now_s)
            del self._gateways[message.life]
        return heard

    def replay(
        self,
        message: BeliefMessage,
        sent_at_s: float,
        now_s: float,
        fresh: Container[PodId],
        stale: Mapping[PodId, float],
    ) -> None:
        """Take up a message that was heard already.

        `fresh`: pods that were not known then. `stale`: pods whose beliefs have been loaded again, as they were a while
        ago: what was taken back since, by this gateway too, is taken back once more, but for what was before the time
        that each has here, when it was emptied.
        """
        other = self._gateways.get(message.life)
        heard = Heard()
        for event in message.events:
            at_s = min(sent_at_s, now_s) - event.age_s
            match event:
                case Routed() | Aboard() | Undone() | Refuted() | Forgotten():
                    if event.pod in fresh:
                        if other is not None:  # else it has stopped since, or it is this gateway
                            self._take(other, event, at_s, heard, fresh)
                    elif isinstance(event, Undone | Refuted) and at_s > stale.get(event.pod, math.inf):
                        self._take(other or _NOBODY, event, at_s, heard, fresh)
                case Began() | Ended():
                    if other is not None and other.in_flight.get(event.number) in fresh:
                        self._take(other, event, at_s, heard, fresh)

    def expire(self, now_s: float) -> None:
        """Forget what gateways that have fallen silent had in flight, and in the end them."""
        for other in self.gateways():
            if now_s - other.heard_at_s > LEASE_S and other.in_flight:
                self._finish(other, list(other.in_flight), now_s)
            if now_s - other.heard_at_s > FORGET_S:
                del self._gateways[other.life]

    def drop(self, pods: Iterable[PodId]) -> None:
        """These lives of pods have ended: nothing is in flight there."""
        gone = set(pods)
        for other in self._gateways.values():
            for number in [number for number, pod in other.in_flight.items() if pod in gone]:
                del other.in_flight[number]

    def _take(self, other: Other, event: Event, at_s: float, heard: Heard, fresh: Container[PodId]) -> None:
        sink = self._sink
        match event:
            case Routed():
                if sink.knows(event.pod):
                    sink.routed(event, at_s)
                    self._send(other, event, at_s)
                    heard.changed.add(event.pod)
            case Ended():
                self._finish(other, (event.number,), at_s)
            case Began():
                if (pod := other.in_flight.get(event.number)) is not None:
                    sink.began(pod, _request(other.life, event.number), at_s)
            case Aboard():
                if event.number not in other.in_flight and sink.knows(event.pod):
                    self._send(other, event, at_s)
                if event.has_begun and event.number in other.in_flight:
                    sink.began(event.pod, _request(other.life, event.number), at_s)
            case Undone():
                if sink.knows(event.pod):
                    sink.undone(event.pod, event.keys, at_s + SAME_S)
                    heard.changed.add(event.pod)
            case Refuted():
                if sink.knows(event.pod):
                    sink.refuted(event.pod, event.keys, event.held_strides, at_s)
                    heard.changed.add(event.pod)
            case Forgotten():
                if sink.knows(event.pod) and (event.is_sure or event.pod in fresh):
                    sink.forgotten(event.pod, at_s)
                    heard.changed.add(event.pod)
                    heard.forgotten_s[event.pod] = at_s
            case Written():
                heard.written.append(event.pod)
                if event.is_recovery:
                    heard.recovered.append(event.pod)
                if event.is_answer:
                    heard.answered.append(event.pod)
            case Wish():
                heard.is_wished |= event.life == ANY_LIFE
                heard.is_missed |= event.life == self._own

    def _send(self, other: Other, event: Routed | Aboard, at_s: float) -> None:
        if event.number in other.in_flight:
            self._finish(other, (event.number,), at_s)
        if len(other.in_flight) >= MAX_IN_FLIGHT:
            return
        other.in_flight[event.number] = event.pod
        self._sink.sent(
            event.pod,
            _request(other.life, event.number),
            prompt_tokens=event.prompt_tokens,
            uncached_tokens=event.uncached_tokens,
            output_tokens=event.output_tokens,
            at_s=at_s,
        )

    def _finish(self, other: Other, numbers: Iterable[int], at_s: float) -> None:
        for number in numbers:
            pod = other.in_flight.pop(number, None)
            if pod is not None:
                self._sink.finished(pod, _request(other.life, number), at_s)

    def _make_room(self) -> None:
        """Whoever makes up ever new gateways gets no more than a bound of memory."""
        while len(self._gateways) >= MAX_GATEWAYS:
            oldest = min(self._gateways.values(), key=lambda other: other.heard_at_s)
            self._finish(oldest, list(oldest.in_flight), oldest.heard_at_s)
            del self._gateways[oldest.life]


def _request(life: Life, number: int) -> str:
    return f"{life:x}.{number}"
