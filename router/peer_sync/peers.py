"""What other gateways' messages say: which gateways run, what each has in flight, what the index has to enter. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from engine.contract.sequence import Step, step
from router.peer_sync.messages import (
    ANY_LIFE,
    Ask,
    Assumed,
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
    """False: the message was heard before, or is this gateway's own."""
    is_gap: bool = False
    """Messages of the sender before this one are missing."""
    is_anyone_asked: bool = False
    """Whether any one gateway is asked for all that it assumes."""
    is_asked: bool = False
    """Whether another gateway missed what this gateway told."""
    forgotten_s: dict[PodId, float] = field(default_factory=dict)
    """Pod that was emptied -> when."""
    changed: set[PodId] = field(default_factory=set)
    """Pods about which something else is assumed now."""


_NOBODY = Peer(ANY_LIFE, "", 0, 0.0)


class Peers:
    """The other gateways that were heard. Messages must be given in the order of their stream."""

    def __init__(self, sink: PeerSink, own: Life) -> None:
        self._sink = sink
        self._own = own
        self._peers: dict[Life, Peer] = {}
        self._stopped: dict[Life, int] = {}
        """The last message of gateways that have stopped, the oldest first: the stream still has their messages."""

    def __len__(self) -> int:
        return len(self._peers)

    def all(self) -> list[Peer]:
        """Return the gateways heard within FORGET_S that have not stopped, in the order in which they became known."""
        return list(self._peers.values())

    def alive(self, now_s: float) -> list[Life]:
        """Return the gateways heard within LEASE_S."""
        return [peer.life for peer in self._peers.values() if now_s - peer.heard_at_s <= LEASE_S]

    def in_flight(self) -> Counter[PodId]:
        """Return the other gateways' requests in flight, by pod. It looks at all of them: for operators."""
        counts: Counter[PodId] = Counter()
        for peer in self._peers.values():
            counts.update(peer.in_flight.values())
        return counts

    def hear(self, message: PeerMessage | Assumed, sent_at_s: float, *, is_past: bool = False) -> Heard:
        """Note that a message has come, sent at `sent_at_s` of this process's clock. `is_past`: it was sent before this
        gateway listened. What is missing before such a message does not matter, because the load has it."""
        if message.life == self._own or message.seq <= self._stopped.get(message.life, 0):
            return Heard(is_news=False)
        peer = self._peers.get(message.life)
        if peer is None:
            self._make_room()
            self._peers[message.life] = Peer(message.life, "", message.seq, sent_at_s)
            return Heard(is_gap=message.seq > 1 and not is_past)
        found = step(peer.seq, message.seq)
        if found is not Step.KNOWN:
            peer.seq, peer.heard_at_s = message.seq, sent_at_s
        return Heard(is_news=found is not Step.KNOWN, is_gap=found is Step.GAP)

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
        relies on what others say. `is_past`: see `hear`.
        """
        sent_at_s = min(sent_at_s, now_s)
        heard = self.hear(message, sent_at_s, is_past=is_past)
        if not heard.is_news:
            if message.life == self._own:  # what was loaded meanwhile may be older than this event
                for event in message.events:
                    if isinstance(event, Undone):
                        self._take(_NOBODY, event, sent_at_s - event.age_s, Heard(), fresh)
            return heard
        peer = self._peers[message.life]
        peer.name = message.name
        if message.lists_in_flight:
            listed = {event.number for event in message.events if isinstance(event, InFlight)}
            self._finish(peer, peer.in_flight.keys() - listed, now_s)
        for event in message.events:
            self._take(peer, event, sent_at_s - event.age_s, heard, fresh)
        if message.is_last:
            self._finish(peer, list(peer.in_flight), now_s)
            self._remove(peer)
            self._stopped[message.life] = message.seq
            if len(self._stopped) > MAX_GATEWAYS:
                del self._stopped[next(iter(self._stopped))]
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

        `fresh`: pods that were not known then. `stale`: pods about which another gateway's assumptions were just
        entered, perhaps in an older state, and when each pod was emptied. If a gateway, this one included, took
        something back about a stale pod after that time, it is taken back once more.
        """
        peer = self._peers.get(message.life)
        heard = Heard()
        for event in message.events:
            at_s = min(sent_at_s, now_s) - event.age_s
            match event:
                case Routed() | InFlight() | Undone() | Refuted() | Forgotten():
                    if event.pod in fresh:
                        if peer is not None:  # None: it has stopped since, or it is this gateway
                            self._take(peer, event, at_s, heard, fresh)
                    elif isinstance(event, Undone | Refuted) and at_s > stale.get(event.pod, math.inf):
                        self._take(peer or _NOBODY, event, at_s, heard, fresh)
                case Began() | Ended():
                    if peer is not None and peer.in_flight.get(event.number) in fresh:
                        self._take(peer, event, at_s, heard, fresh)

    def expire(self, now_s: float) -> None:
        """Forget the requests in flight of gateways that have fallen silent, and after FORGET_S the gateways."""
        for peer in self.all():
            if now_s - peer.heard_at_s > LEASE_S and peer.in_flight:
                self._finish(peer, list(peer.in_flight), now_s)
            if now_s - peer.heard_at_s > FORGET_S:
                self._remove(peer)

    def drop(self, pods: Iterable[PodId]) -> None:
        """Note that these pods have gone or restarted: nothing is in flight there."""
        gone = set(pods)
        for peer in self._peers.values():
            for number in [number for number, pod in peer.in_flight.items() if pod in gone]:
                del peer.in_flight[number]

    def _take(self, peer: Peer, event: Event, at_s: float, heard: Heard, fresh: Container[PodId]) -> None:
        sink = self._sink
        match event:
            case Routed():
                if sink.knows(event.pod):
                    sink.routed(event, at_s)
                    self._send(peer, event, at_s)
                    heard.changed.add(event.pod)
            case Ended():
                self._finish(peer, (event.number,), at_s)
            case Began():
                if (pod := peer.in_flight.get(event.number)) is not None:
                    sink.began(pod, _request(peer.life, event.number), at_s)
            case InFlight():
                if event.number not in peer.in_flight and sink.knows(event.pod):
                    self._send(peer, event, at_s)
                if event.has_begun and event.number in peer.in_flight:
                    sink.began(event.pod, _request(peer.life, event.number), at_s)
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
            case Ask():
                heard.is_anyone_asked |= event.life == ANY_LIFE
                heard.is_asked |= event.life == self._own

    def _send(self, peer: Peer, event: Routed | InFlight, at_s: float) -> None:
        if event.number in peer.in_flight:
            self._finish(peer, (event.number,), at_s)
        if len(peer.in_flight) < MAX_IN_FLIGHT:
            peer.in_flight[event.number] = event.pod
            self._sink.sent(event, _request(peer.life, event.number), at_s)

    def _finish(self, peer: Peer, numbers: Iterable[int], at_s: float) -> None:
        for number in numbers:
            pod = peer.in_flight.pop(number, None)
            if pod is not None:
                self._sink.finished(pod, _request(peer.life, number), at_s)

    def _make_room(self) -> None:
        """Bound the memory that a sender can take by inventing ever new gateways."""
        while len(self._peers) >= MAX_GATEWAYS:
            oldest = min(self._peers.values(), key=lambda peer: peer.heard_at_s)
            self._finish(oldest, list(oldest.in_flight), oldest.heard_at_s)
            self._remove(oldest)

    def _remove(self, peer: Peer) -> None:
        del self._peers[peer.life]
        self._sink.gone(f"{peer.life:x}")


def _request(life: Life, number: int) -> str:
    return f"{life:x}.{number}"
