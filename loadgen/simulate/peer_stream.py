"""The delay of messages between gateways: all of them write to and read from one Redis stream.

A reader takes all entries that came before its next read, as `router.peer_sync.reader` does. The gateways' own
timing is simulated. The rest, the delay of one way to Redis or back, is drawn for each message:

    way = NETWORK_S + CPU_S * exp(SPREAD * normal)

CPU_S and SPREAD are fitted to two real gateways with a real Redis on an idle machine of two cores, over loopback
(`python -m tests.bench.gateway.bench_peer_sync_late`, 2026-11-23; loadgen/MEASURED.md has the fit)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from loadgen.simulate.gateway import Gateway
from loadgen.simulate.pods.timeline import Timeline
from router.peer_sync.messages import PeerMessage
from router.peer_sync.pace import ReadPace

NETWORK_S = 0.00025
"""Delay of one way between two machines of a cluster. It is assumed, not measured, and makes 0.5 ms between two
gateways."""
CPU_S = 0.00035
"""Median time of encoding, system calls, Redis, decoding and other work of the event loop, one way."""
SPREAD = 0.6
"""Standard deviation of the logarithm of that time."""


class PeerStream:
    """Delivers what one gateway writes to all others."""

    def __init__(self, timeline: Timeline, gateways: Sequence[Gateway], *, seed: int, scale: float = 1.0) -> None:
        """`scale`: factor of all delays; 0: everything arrives at once."""
        self._timeline = timeline
        self._rng = random.Random(f"beliefs {seed}")
        self._scale = scale
        self._readers = [_Reader(gateway) for gateway in gateways]
        self._last_s = dict.fromkeys((gateway.chooser_name for gateway in gateways), 0.0)

    def append(self, by: Gateway, message: PeerMessage) -> None:
        """Send a gateway's message to the others now. Messages of one gateway keep their order."""
        sent_s, name = self._timeline.now_s, by.chooser_name
        at_s = self._last_s[name] = max(self._last_s[name], sent_s + self._way_s())
        self._timeline.at(at_s, partial(self._enter, _Entry(name, message, sent_s)))

    def _way_s(self) -> float:
        return self._scale * (NETWORK_S + CPU_S * math.exp(SPREAD * self._rng.gauss(0.0, 1.0)))

    def _enter(self, entry: _Entry) -> None:
        for reader in self._readers:
            reader.unread.append(entry)
            if reader.is_waiting:
                self._answer(reader)

    def _answer(self, reader: _Reader) -> None:
        """Send the entries that the gateway has not read."""
        reader.is_waiting = False
        entries, reader.unread = reader.unread, []
        self._timeline.after(self._way_s(), partial(self._take, reader, entries))

    def _take(self, reader: _Reader, entries: Sequence[_Entry]) -> None:
        for entry in entries:
            if entry.by != reader.gateway.chooser_name:
                reader.gateway.heard(entry.message, entry.sent_s)
        pause_s = reader.pace.pause_s(self._timeline.now_s, len(self._readers))
        self._timeline.after(self._scale * pause_s + self._way_s(), partial(self._ask, reader))

    def _ask(self, reader: _Reader) -> None:
        """The gateway's next read has reached Redis; it waits there for the next entry."""
        reader.is_waiting = True
        if reader.unread:
            self._answer(reader)


class _Entry(NamedTuple):
    by: str
    message: PeerMessage
    sent_s: float


@dataclass(slots=True)
class _Reader:
    gateway: Gateway
    pace: ReadPace = field(default_factory=ReadPace)
    unread: list[_Entry] = field(default_factory=list)
    is_waiting: bool = True
