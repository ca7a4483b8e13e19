"""What other gateways' messages say: which gateways run, what each has in flight, what the index has to enter. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from router.peer_sync.messages import (
    ANY_LIFE,
    Began,
    Ended,
    Event,
    Forgotten,
    InFlight,
    Life,
    PeerMessage,
    PeerSink,
    Refuted,
    Routed,
    Undone,
    Wish,
    Written,
)
from router.views.types import PodId

LEASE_S = 7.0
"""Three heartbeats. If a gateway is silent for longer, its requests in flight no longer count."""
FORGET_S = 600.0
"""A gateway that is silent for longer is forgotten; if it is heard again, it counts as new."""
SAME_S = 0.01
"""Two messages may give times of one event that differ by less than this: Redis counts milliseconds."""
MAX_GATEWAYS = 1024
MAX_IN_FLIGHT = 65_536
"""The most requests in flight that count for one gateway."""


@dataclass(slots=True)
class Peer:
    """One other gateway. Times are seconds of this process's clock."""

    life: Life
    name: str
    seq: int
    heard_at_s: float
    in_flight: dict[int, PodId] = field(default_factory=dict)
    """The request's number -> its pod."""


@dataclass(slots=True)
class Heard:
    """What the reader of a message has to do, besides what the sink was told."""

    is_news: bool = True
    """False: the message was heard before."""
    is_gap: bool = False
    """Messages of the sender before this one are missing."""
    written: list[PodId] = field(default_factory=list)
    """Pods about which the sender has just written its beliefs to Redis."""
    recovered: list[PodId] = field(default_factory=list)
    """Those of them about which the sender had lost events, so that this gateway has to load what was written."""
    answered: list[PodId] = field(default_factory=list)
    """Those of them that were written in answer to such a recovery, because the sender believed more about them."""
    is_wished: bool = False
    """Whether any gateway is asked to write what it believes."""
    is_missed: bool = False
    """Whether another gateway missed what this gateway told."""
    forgotten_s: dict[PodId, float] = field(default_factory=dict)
    """Pod that was emptied -> when."""
    changed: set[PodId] = field(default_factory=set)
    """Pods whose beliefs have changed."""


_NOBODY = Peer(ANY_LIFE, "", 0, 0.0)


class Peers:
    """The other gateways that were heard. Messages must be given in the order of their stream."""

    def __init__(self, sink: PeerSink, own: Life) -> None:
        self._sink = sink
        self._own = own
        self._gateways: dict[Life, Peer] = {}

    def __len__(self) -> int:
        return len(self._gateways)

    def gateways(self) -> list[Peer]:
        """Return the gateways heard within FORGET_S that have not stopped, in the order in which they became known."""
        return list(self._gateways.values())

    def in_flight(self) -> Counter[PodId]:
        """Return the other gateways' requests in flight, by pod. It looks at all of them: for operators."""
        counts: Counter[PodId] = Counter()
        for other in self._gateways.values():
            counts.update(other.in_flight.values())
        return counts

    def apply(
        self,
        message: PeerMessage,
        sent_at_s: float,
        now_s: float,
        fresh: Container[PodId] = frozenset(),
        *,
        is_past: bool = False,
    ) -> Heard:
        """Process a message, sent at `sent_at_s` of this process's clock, which may be a while ago.

        `fresh`: pods that were unknown here when the message was sent. This gateway did not see these restart, so it
        relies on what others say. `is_past`: the message was sent before this gateway listened. What is missing before
        such a message does not matter, because the load has it.
        """
        sent_at_s = min(sent_at_s, now_s)
        heard = Heard()
        if message.life == self._own:
            heard.is_news = False
            for event in message.events:  # beliefs that were loaded meanwhile may be older than this event
                if isinstance(event, Undone):
                    self._take(_NOBODY, event, sent_at_s - event.age_s, Heard(), fresh)
            return heard
        other = self._gateways.get(message.life)
        if other is None:
            self._make_room()
            other = self._gateways[message.life] = Peer(message.life, message.name, message.seq, sent_at_s)
            heard.is_gap = message.seq > 1 and not is_past
        elif message.seq <= other.seq:
            heard.is_news = False
            return heard
        else:
            heard.is_gap = message.seq > other.seq + 1
            other.seq, other.heard_at_s = message.seq, sent_at_s
        if message.lists_in_flight:
            listed = {event.number for event in message.events if isinstance(event, InFlight)}
            self._finish(other, other.in_flight.keys() - listed, now_s)
        for event in message.events:
            self._take(other, event, sent_at_s - event.age_s, heard, fresh)
        if message.is_last:
            self._finish(other, list(other.in_flight), now_s)
            del self._gateways[message.life]
        return heard

    def replay(
        self,
        message: PeerMessage,
        sent_at_s: float,
        now_s: float,
        fresh: Container[PodId],
        stale: Mapping[PodId, float],
    ) -> None:
        """Process a message again that was heard already.

        `fresh`: pods that were not known then. `stale`: pods whose beliefs were just loaded again, perhaps in an older
        state, and when each pod was emptied. If a gateway, this one included, took back beliefs about a stale pod after
        that time, they are taken back once more.
        """
        other = self._gateways.get(message.life)
        heard = Heard()
        for event in message.events:
            at_s = min(sent_at_s, now_s) - event.age_s
            match event:
                case Routed() | InFlight() | Undone() | Refuted() | Forgotten():
                    if event.pod in fresh:
                        if other is not None:  # None: it has stopped since, or it is this gateway
                            self._take(other, event, at_s, heard, fresh)
                    elif isinstance(event, Undone | Refuted) and at_s > stale.get(event.pod, math.inf):
                        self._take(other or _NOBODY, event, at_s, heard, fresh)
                case Began() | Ended():
                    if other is not None and other.in_flight.get(event.number) in fresh:
                        self._take(other, event, at_s, heard, fresh)

    def expire(self, now_s: float) -> None:
        """Forget the requests in flight of gateways that have fallen silent, and after FORGET_S the gateways."""
        for other in self.gateways():
            if now_s - other.heard_at_s > LEASE_S and other.in_flight:
                self._finish(other, list(other.in_flight), now_s)
            if now_s - other.heard_at_s > FORGET_S:
                del self._gateways[other.life]

    def drop(self, pods: Iterable[PodId]) -> None:
        """Note that these pods have gone or restarted: nothing is in flight there."""
        gone = set(pods)
        for other in self._gateways.values():
            for number in [number for number, pod in other.in_flight.items() if pod in gone]:
                del other.in_flight[number]

    def _take(self, other: Peer, event: Event, at_s: float, heard: Heard, fresh: Container[PodId]) -> None:
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
            case InFlight():
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

    def _send(self, other: Peer, event: Routed | InFlight, at_s: float) -> None:
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

    def _finish(self, other: Peer, numbers: Iterable[int], at_s: float) -> None:
        for number in numbers:
            pod = other.in_flight.pop(number, None)
            if pod is not None:
                self._sink.finished(pod, _request(other.life, number), at_s)

    def _make_room(self) -> None:
        """Bound the memory that a sender can take by inventing ever new gateways."""
        while len(self._gateways) >= MAX_GATEWAYS:
            oldest = min(self._gateways.values(), key=lambda other: other.heard_at_s)
            self._finish(oldest, list(oldest.in_flight), oldest.heard_at_s)
            del self._gateways[oldest.life]


def _request(life: Life, number: int) -> str:
    return f"{life:x}.{number}"
