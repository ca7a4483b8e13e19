"""What the other gateways tell, and what was assumed about pods that are new here, from Redis into a `PeerSink`.

A load first notes the end of the stream, then reads what is written about pods, then processes the messages of the last
RETAIN_S up to that end. If a message is processed twice for a pod, nothing changes, because all messages after it are
processed again too.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from engine.contract.events import DecodeError
from engine.contract.redis_keys import PEER_STREAM, STREAM_DATA_FIELD, assumed_key
from router.peer_sync.codec import decode
from router.peer_sync.messages import ANY_LIFE, Assumed, Life, PeerMessage, PeerSink
from router.peer_sync.outbox import Outbox
from router.peer_sync.pace import ReadPace
from router.peer_sync.peers import SAME_S, Heard, Peers
from router.peer_sync.write_plan import WritePlan
from router.registry.stream_reader import StreamReader
from router.registry.wire import Entry, RedisClock, Wire, sent_at
from router.views.types import PodId

RETAIN_S = 45.0
"""Messages are kept at least this long, longer if that is cheaper: what is assumed is written more often than this."""
KEPT_S = 600.0
"""What was assumed about a pod is kept this long, even if no gateway is left to write it again."""
UNDERWAY_S = 5.0
"""The longest that a message can be on its way to Redis. If it seems longer, the sender's clock is wrong."""
SILENCE_S = 10.0
"""If not even this gateway's own messages came for this long, the address may lead to another server by now."""
ASK_S = 1.0
"""Seconds between a load that found nothing and the question to the other gateways."""
ANSWER_S = 0.3
"""Questions are answered within this time. Those that come until then get one answer; if any gateway may answer, the
one that draws the shortest time does."""
COMPLAINT_S = 60.0
"""The same complaint is logged this often."""


@dataclass(frozen=True, slots=True)
class PeerSeen:
    """Another gateway that was heard."""

    name: str
    life: str
    silent_s: float
    in_flight: int


@dataclass(frozen=True, slots=True)
class PeerSyncStatus:
    """What gateways share, as an operator sees it."""

    sharing: bool = False
    connected: bool = False
    gateways: Sequence[PeerSeen] = ()
    sent: int = 0
    """Messages of this gateway."""
    sent_bytes: int = 0
    lost: int = 0
    """Events of this gateway that were lost, so that it sent all that it assumed."""
    waiting: int = 0
    """Events that are to be told."""
    written: int = 0
    """Times that all that is assumed about a pod was written."""
    heard: int = 0
    """Messages of other gateways."""
    refused: int = 0
    """Messages that were refused."""
    unknown: int = 0
    """Messages of another version, which were skipped."""
    gaps: int = 0
    """Times that messages of a gateway were missing."""
    pods: int = 0
    """Pods about which others told something."""
    lag_s: float = 0.0
    """Seconds from the sending of the last message to its reading."""
    last_error: str | None = None
    failures: int = 0
    """Times that Redis failed."""


class PeerReader(StreamReader):
    """Reads the messages of the other gateways and passes them to `peers`."""

    def __init__(
        self, wire: Wire, outbox: Outbox, peers: Peers, sink: PeerSink, plan: WritePlan, clock: RedisClock
    ) -> None:
        super().__init__(
            "gateways", wire, "this one goes by what it knows", silence_s=SILENCE_S, complaint_s=COMPLAINT_S
        )
        self._outbox = outbox
        self._peers = peers
        self._sink = sink
        self._plan = plan
        self._clock = clock
        self._pods: set[PodId] = set()
        self._fresh: set[PodId] = set()
        """Pods for which nothing was looked up yet."""
        self._stale: set[PodId] = set()
        """Pods about which another gateway has just sent all that it assumes, perhaps in an older state."""
        self._unfound: set[PodId] = set()
        """Pods about which nothing was written, though there are other gateways."""
        self._told: set[PodId] = set()
        """Pods about which others told something."""
        self._void_s: dict[PodId, float] = {}
        """When a pod restarted or was emptied, by this process's clock: what was assumed before is void."""
        self._asks: dict[Life, float] = {}
        """Gateway whose messages are missing, or ANY_LIFE -> when to ask it."""
        self._answer_at_s = math.inf
        """When to answer a question to any gateway."""
        self._pace = ReadPace()
        self._heard = self._gaps = 0
        self._lag_s = 0.0

    # -- what the rest of the gateway calls -------------------------------------------------------------------

    def set_pods(self, pods: Collection[PodId], ended: Collection[PodId]) -> None:
        """Set the pods of the fleet. `ended`: pods that have gone or restarted since the last call."""
        now_s = asyncio.get_running_loop().time()
        gone = self._pods - set(pods)
        self._peers.drop({*gone, *ended})
        self._plan.drop(gone)
        self._void_s |= dict.fromkeys(ended, now_s)
        for known in (self._fresh, self._stale, self._unfound, self._told):
            known -= gone
        self._fresh |= set(pods) - self._pods
        self._pods = set(pods)
        for times in (self._void_s, self._outbox.forgotten_s):
            for pod in [pod for pod, at_s in times.items() if pod not in pods and now_s - at_s > KEPT_S]:
                del times[pod]

    def status(self) -> PeerSyncStatus:
        """Return this side's status; the sender adds what was sent."""
        now_s = asyncio.get_running_loop().time()
        return PeerSyncStatus(
            sharing=True,
            connected=self._outage.is_connected,
            gateways=[
                PeerSeen(peer.name, f"{peer.life:016x}", max(0.0, now_s - peer.heard_at_s), len(peer.in_flight))
                for peer in self._peers.all()
            ],
            lost=self._outbox.lost,
            waiting=len(self._outbox),
            heard=self._heard,
            refused=self._refused,
            unknown=self._unknown,
            gaps=self._gaps,
            pods=len(self._told),
            lag_s=self._lag_s,
            last_error=self._last_error(),
            failures=self._outage.failures,
        )

    # -- one connection ---------------------------------------------------------------------------------------

    def _is_warm(self) -> bool:
        return not self._fresh

    async def _begin(self) -> None:
        await self._clock.sync(self._wire)
        self._tails[PEER_STREAM] = await self._wire.newest(PEER_STREAM)
        await self._load(catches_up=True)

    async def _lost(self) -> None:
        self._peers.expire(asyncio.get_running_loop().time())
        self._clock.lost()
        await super()._lost()

    async def _tick(self, now_s: float) -> None:
        self._peers.expire(now_s)
        self._ask(now_s)
        if now_s >= self._answer_at_s:
            self._answer_at_s = math.inf
            self._outbox.resend_at_s = now_s
        await self._clock.sync(self._wire)

    def _pause_s(self, now_s: float) -> float:
        return self._pace.pause_s(now_s, 1 + len(self._peers))

    def _take(self, stream: str, entries: Sequence[Entry]) -> None:
        now_s = self._heard_at_s = asyncio.get_running_loop().time()
        for entry in entries:
            self._take_entry(entry, now_s)
        self._lag_s = max(0.0, now_s - self._clock.here(sent_at(entries[-1][0])))

    def _take_entry(
        self,
        entry: Entry,
        now_s: float,
        fresh: Collection[PodId] = (),
        stale: Mapping[PodId, float] | None = None,
        *,
        is_past: bool = False,
    ) -> None:
        """Process one message. `is_past`: it was sent before this gateway listened, so it is not answered now."""
        name, fields = entry
        message = self._decoded("a gateway's message", fields[1] if fields[0] == STREAM_DATA_FIELD else b"")
        if message is None:
            return
        came_s = sent_at(name)
        if isinstance(message, Assumed):
            heard = self._peers.hear(message, self._clock.here(came_s), is_past=is_past)
            if heard.is_news:
                self._answer_at_s = math.inf
                self._stale.add(message.pod)
            if heard.is_news or message.pod in fresh:
                self._enter(message, now_s)
        else:
            # Use the sender's time: an event is as old as it says, even if Redis got the message late.
            is_plausible = abs(came_s - message.at_s) <= UNDERWAY_S
            sent_at_s = self._clock.here(message.at_s if is_plausible else came_s)
            heard = self._peers.apply(message, sent_at_s, now_s, fresh, is_past=is_past)
            if not heard.is_news and (fresh or stale):
                self._peers.replay(message, sent_at_s, now_s, fresh, stale or {})
        if heard.is_news:
            self._note(message, heard, now_s, is_past=is_past)

    def _note(self, message: PeerMessage | Assumed, heard: Heard, now_s: float, *, is_past: bool) -> None:
        """Note what a message asks for."""
        self._heard += 1
        self._told |= heard.changed
        self._plan.changed(heard.changed, now_s)
        for pod, at_s in heard.forgotten_s.items():
            self._void_s[pod] = max(self._void_s.get(pod, -math.inf), at_s + SAME_S)
        if heard.is_gap:
            self._gaps += 1
            self._asks.setdefault(message.life, now_s)
        if heard.is_asked and not is_past:
            self._outbox.resend_at_s = min(self._outbox.resend_at_s, now_s + ANSWER_S)
        if heard.is_anyone_asked and not is_past:
            self._answer_at_s = min(self._answer_at_s, now_s + random.uniform(0, ANSWER_S))

    # -- loading ----------------------------------------------------------------------------------------------

    async def _load(self, *, catches_up: bool = False) -> None:
        """Load what is written about fresh pods, and process the messages of the last RETAIN_S again for fresh and
        stale pods. `catches_up`: also process those messages that were not heard."""
        if not (self._fresh or self._stale or catches_up):
            return
        fresh = frozenset(self._fresh)
        pods = sorted(fresh)
        async for at, data in self._snapshots([assumed_key(pod) for pod in pods]):
            written = None if data is None else self._decoded(f"what is assumed about pod {pods[at]}", data)
            if isinstance(written, Assumed):
                self._enter(written, asyncio.get_running_loop().time())
            elif pods[at] in self._pods:
                self._unfound.add(pods[at])
                self._asks.setdefault(ANY_LIFE, asyncio.get_running_loop().time() + ASK_S)
        now_s = asyncio.get_running_loop().time()
        stale, self._stale = self._stale, set()
        void_s = {pod: self._void(pod) for pod in stale}
        since_s = self._clock.there(now_s) - RETAIN_S
        async for page in self._wire.range(PEER_STREAM, since_s, self._tails[PEER_STREAM]):
            for entry in page:
                self._take_entry(entry, now_s, fresh, void_s, is_past=True)
            await asyncio.sleep(0)
        self._fresh -= fresh
        self._loaded.set()

    def _decoded(self, about: str, data: bytes) -> PeerMessage | Assumed | None:
        """Return the message; None if it is of another version, not valid, or has keys of another length."""
        try:
            message = decode(data)
            if message.stride != self._outbox.stride:
                raise DecodeError(
                    f"it has prefix keys every {message.stride} bytes, this gateway every {self._outbox.stride}: "
                    "all gateways must be of one release"
                )
        except DecodeError as error:
            self._refuse(about, error)
            return None
        return message

    def _enter(self, assumed: Assumed, now_s: float) -> None:
        """Assume what another gateway assumed about a pod."""
        pod, void_s = assumed.pod, self._void(assumed.pod)
        self._unfound.discard(pod)
        if pod not in self._pods or not self._sink.knows(pod):
            return
        runs = [(min(now_s, self._clock.here(at_s)), keys) for at_s, keys in assumed.runs]
        runs = [(at_s, keys) for at_s, keys in runs if at_s > void_s]
        if runs:
            self._sink.assume(pod, runs)
            self._told.add(pod)
            self._plan.changed((pod,), now_s)

    def _void(self, pod: PodId) -> float:
        """Return the time before which all assumptions about the pod are void."""
        return max(self._void_s.get(pod, -math.inf), self._outbox.forgotten_s.get(pod, -math.inf))

    def _ask(self, now_s: float) -> None:
        for life, due_s in list(self._asks.items()):
            if now_s < due_s:
                continue
            del self._asks[life]
            if life == ANY_LIFE:
                self._unfound = {pod for pod in self._unfound if self._sink.knows(pod)}
                if not self._unfound or not len(self._peers):
                    continue
            self._outbox.ask(life, now_s)
