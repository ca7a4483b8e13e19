"""Set up what gateways share about pods that publish nothing, or a stand-in if there is no Redis."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol

from router.choosing.chooser import Chooser
from router.choosing.peer_reports import PeerReports
from router.fleet.fleet import FleetChange
from router.fleet.pod import Pod
from router.peer_sync.keyed_values import KeyedValues, ValueKind
from router.peer_sync.messages import Life
from router.peer_sync.outbox import Outbox
from router.peer_sync.peers import Peers
from router.peer_sync.reader import PeerReader, PeerSyncStatus
from router.peer_sync.sender import PeerSender
from router.peer_sync.sent_reports import SentReports
from router.peer_sync.write_plan import WritePlan
from router.registry.learnt import Learnt
from router.registry.wire import RedisClock, RedisWire
from router.views.types import PodId


class PeerSyncView(Protocol):
    """The part of sharing that operators see."""

    def status(self) -> PeerSyncStatus:
        """Return counters and state."""

    def in_flight(self) -> Counter[PodId]:
        """Return the requests of other gateways in flight, by pod."""


class NoPeerSync:
    """PeerSync of a gateway that knows only what it did itself."""

    def status(self) -> PeerSyncStatus:
        """Return the status of a gateway that shares nothing."""
        return PeerSyncStatus()

    def in_flight(self) -> Counter[PodId]:
        """Return an empty count: other gateways are not known."""
        return Counter()


def new_outbox(name: str, stride: int) -> Outbox:
    """Return the outbox of a gateway that has just started. `name` is for operators only; gateways tell each other
    apart by a random number."""
    return Outbox(Life(secrets.randbits(64) or 1), name, stride)


class PeerSync:
    """Shares with other gateways through Redis. Needs a running loop. The caller runs the work that `start` returns."""

    def __init__(
        self,
        redis_url: str,
        outbox: Outbox,
        pod_of: Callable[[PodId], Pod | None],
        chooser: Chooser,
        sent_reports: SentReports,
        learnt: ValueKind[Learnt],
    ) -> None:
        sink = PeerReports(pod_of, chooser, sent_reports, clock=asyncio.get_running_loop().time)
        self._peers = Peers(sink, outbox.life)
        plan, clock = WritePlan(outbox.life), RedisClock()
        self.sender = PeerSender(RedisWire(redis_url), outbox, self._peers, sink, plan, clock)
        self.reader = PeerReader(RedisWire(redis_url), outbox, self._peers, sink, plan, clock)
        self._learnt = KeyedValues(redis_url, learnt)

    async def start(self) -> Sequence[tuple[str, Coroutine[Any, Any, None]]]:
        """Load what others have learnt, and return the names and coroutines of the work to run until the end.

        Call it before any pod is known, since the ratios that others learnt are needed to read what they report on
        pods.
        """
        await self._learnt.load()
        return (
            ("telling the other gateways", self.sender.run()),
            ("hearing the other gateways", self.reader.run()),
            ("keeping what was learnt", self._learnt.run()),
        )

    def fleet_changed(self, change: FleetChange) -> None:
        """Apply a change of the set of pods. Call it after the keys of restarted or removed pods have been dropped."""
        self.reader.set_pods(change.pods.keys(), change.ended)

    def status(self) -> PeerSyncStatus:
        """See PeerSyncView."""
        status, sender = self.reader.status(), self.sender
        return replace(
            status,
            sent=sender.sent,
            sent_bytes=sender.sent_bytes,
            written=sender.written,
            last_error=status.last_error or sender.last_error,
        )

    def in_flight(self) -> Counter[PodId]:
        """See PeerSyncView."""
        return self._peers.in_flight()

    async def close(self) -> None:
        """Tell the other gateways that this one ends. Call it after the tasks have ended."""
        await asyncio.gather(self.sender.close(), self._learnt.close())


def make_peer_sync(
    redis_url: str | None,
    outbox: Outbox | None,
    pod_of: Callable[[PodId], Pod | None],
    chooser: Chooser,
    sent_reports: SentReports,
    learnt: ValueKind[Learnt],
) -> PeerSync | NoPeerSync:
    """Return the sharing of this gateway. `redis_url`, `outbox`: None if nothing is shared."""
    if redis_url is None or outbox is None:
        return NoPeerSync()
    return PeerSync(redis_url, outbox, pod_of, chooser, sent_reports, learnt)
