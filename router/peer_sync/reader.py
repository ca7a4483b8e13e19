"""Hears what the other gateways tell, and loads the beliefs about pods that are new here. No request waits for it.

A load first notes the end of the stream, then reads the written beliefs, then processes the messages of the last
RETAIN_S up to that end. Later messages are read from there on as usual. If a message is processed twice for a pod,
nothing changes, because all messages after it are processed again too.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from engine.common.redis_client import raise_if_cancelled
from engine.common.redis_loop import Outage, keep_trying
from engine.contract.events import DecodeError, UnknownVersion
from router.peer_sync.assumed_snapshot import decode_snapshot
from router.peer_sync.codec import decode
from router.peer_sync.messages import ANY_LIFE, Life
from router.peer_sync.pace import ReadPace
from router.peer_sync.peers import SAME_S, Heard
from router.peer_sync.shared_state import SharedState
from router.peer_sync.wire import KEPT_S, READ_ENTRIES, RETAIN_S, UNDERWAY_S, Entry, PeerWire, sent_at
from router.views.types import PodId

log = logging.getLogger(__name__)

POLL_MS = 100
SNAPSHOTS_AT_A_TIME = 8
SILENCE_S = 10.0
"""If not even this gateway's own messages came for this long, the address may lead to another server by now."""
WISH_S = 1.0
"""Seconds between two wishes, and between a load that found nothing and the wish that follows it."""
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
    """Events of this gateway that were lost, so that beliefs were written whole."""
    waiting: int = 0
    """Events that are to be told."""
    written: int = 0
    """Times that a pod's beliefs were written."""
    heard: int = 0
    """Messages of other gateways."""
    refused: int = 0
    """Messages and beliefs that were refused."""
    unknown: int = 0
    """Messages of another version, which were skipped."""
    gaps: int = 0
    """Times that messages of a gateway were missing."""
    pods: int = 0
    """Pods about which others told something."""
    lag_s: float = 0.0
    """Seconds from the sending of the last message to its reading."""
    last_error: str | None = None


class PeerReader:
    """Reads the messages in `wire` and passes them to `others`. It survives every failure of Redis."""

    def __init__(self, wire: PeerWire, shared: SharedState) -> None:
        self._wire = wire
        self._outbox = shared.outbox
        self._others = shared.others
        self._plan = shared.plan
        self._sink = shared.sink
        self._stride = shared.stride
        self._clock = shared.clock
        self._pods: set[PodId] = set()
        self._fresh: set[PodId] = set()
        """Pods for which nothing was looked up yet."""
        self._stale: dict[PodId, bool] = {}
        """Pod about which another gateway wrote beliefs because it had lost events -> whether this gateway should
        answer with what it knows."""
        self._unfound: set[PodId] = set()
        """Pods whose beliefs were not found, though there are other gateways."""
        self._told: set[PodId] = set()
        """Pods about which others told something."""
        self._void_s: dict[PodId, float] = {}
        """When a pod restarted or was emptied, by this process's clock: earlier beliefs are void."""
        self._wishes: dict[Life, float] = {}
        """Gateway whose messages are missing, or ANY_LIFE -> when the wish may be made."""
        self._tail = b"0-0"
        self._heard_at_s = 0.0
        self._pace = ReadPace()
        self._changed = asyncio.Event()
        self._outage = Outage(log, "gateways", "this one goes by what it knows")
        self._complaints: dict[str, float] = {}
        self._heard = self._refused = self._unknown = self._gaps = 0
        self._lag_s = 0.0
        self._complaint: str | None = None

    # -- what the rest of the gateway calls -------------------------------------------------------------------

    def set_pods(self, pods: Collection[PodId], ended: Collection[PodId]) -> None:
        """Set the pods of the fleet. `ended`: pods that have gone or restarted since the last call."""
        now_s = asyncio.get_running_loop().time()
        gone = self._pods - set(pods)
        self._others.drop({*gone, *ended})
        self._plan.drop(gone)
        for pod in ended:
            self._void_s[pod] = now_s
        for known in (self._fresh, self._unfound, self._told):
            known -= gone
        for pod in gone:
            self._stale.pop(pod, None)
        self._fresh |= set(pods) - self._pods
        self._pods = set(pods)
        for times in (self._void_s, self._outbox.forgotten_s):
            for pod in [pod for pod, at_s in times.items() if pod not in pods and now_s - at_s > KEPT_S]:
                del times[pod]

    async def wait_warm(self, timeout_s: float) -> bool:
        """Wait until the written beliefs about every known pod are loaded. False: not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._fresh:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def status(self) -> PeerSyncStatus:
        """Return this side's status; the publisher adds what was sent."""
        now_s = asyncio.get_running_loop().time()
        return PeerSyncStatus(
            sharing=True,
            connected=self._outage.is_connected,
            gateways=[
                PeerSeen(other.name, f"{other.life:016x}", max(0.0, now_s - other.heard_at_s), len(other.in_flight))
                for other in self._others.gateways()
            ],
            lost=self._outbox.lost,
            waiting=len(self._outbox),
            heard=self._heard,
            refused=self._refused,
            unknown=self._unknown,
            gaps=self._gaps,
            pods=len(self._told),
            lag_s=self._lag_s,
            last_error=self._outage.last_error or self._complaint,
        )

    async def run(self) -> None:
        """Follow the other gateways until cancelled."""
        await keep_trying(self._follow, self._outage, self._reset)

    async def _reset(self) -> None:
        self._others.expire(asyncio.get_running_loop().time())
        self._clock.lost()
        await self._wire.reset()

    # -- one connection ---------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        clock = asyncio.get_running_loop().time
        await self._clock.sync(self._wire)
        self._tail = await self._wire.newest()
        await self._load(catches_up=True)
        self._heard_at_s = clock()
        while clock() - self._heard_at_s <= SILENCE_S:
            raise_if_cancelled()
            if self._fresh or self._stale:
                await self._load()
            entries = await self._wire.read(self._tail, POLL_MS)
            for entry in entries:
                self._tail = entry[0]
                self._take(entry)
            if entries:
                self._heard_at_s = clock()
                self._lag_s = max(0.0, clock() - self._clock.here(sent_at(self._tail)))
            if not self._outage.is_connected:
                self._complaint = None
            self._outage.succeeded()
            self._others.expire(clock())
            self._make_wishes()
            await self._clock.sync(self._wire)
            if len(entries) < READ_ENTRIES:
                await asyncio.sleep(self._pace.pause_s(clock(), 1 + len(self._others)))

    def _take(
        self,
        entry: Entry,
        fresh: Collection[PodId] = (),
        stale: Mapping[PodId, float] | None = None,
        *,
        is_past: bool = False,
    ) -> None:
        """Process one message. `is_past`: it was sent before this gateway listened, so its wishes are not answered
        now."""
        name, data = entry
        try:
            message = decode(data)
        except UnknownVersion as error:
            self._unknown += 1
            self._complain(f"{error}; until then this gateway ignores the other's messages")
            return
        except DecodeError as error:
            self._refused += 1
            self._complain(str(error))
            return
        if message.stride != self._stride:
            self._refused += 1
            self._complain(
                f"gateway {message.name} computes prefix keys every {message.stride} bytes, this one every "
                f"{self._stride}: start both with the same --stride"
            )
            return
        now_s = asyncio.get_running_loop().time()
        # Use the sender's time: an event is as old as it says, even if Redis got the message late.
        came_s, sent_at_s = sent_at(name), message.at_s
        sent_at_s = self._clock.here(sent_at_s if abs(came_s - sent_at_s) <= UNDERWAY_S else came_s)
        heard = self._others.apply(message, sent_at_s, now_s, fresh, is_past=is_past)
        if not heard.is_news:
            if fresh or stale:
                self._others.replay(message, sent_at_s, now_s, fresh, stale or {})
            return
        self._heard += 1
        self._told |= heard.changed
        for pod in heard.changed:
            self._plan.changed(pod, now_s)
        for pod, at_s in heard.forgotten_s.items():
            self._void_s[pod] = max(self._void_s.get(pod, -math.inf), at_s + SAME_S)
        if heard.is_gap:
            self._gaps += 1
            self._wishes.setdefault(message.life, now_s)
        if not is_past:
            self._answer(heard, now_s)

    def _answer(self, heard: Heard, now_s: float) -> None:
        for pod in heard.written:
            self._plan.written(pod, now_s)
            if pod in self._unfound:
                self._unfound.discard(pod)
                self._stale.setdefault(pod, False)
        for pod in self._pods.intersection(heard.recovered):
            self._stale[pod] = True
        for pod in self._pods.intersection(heard.answered):
            self._stale.setdefault(pod, False)
        if heard.is_wished:
            self._plan.asked(now_s)
        if heard.is_missed:
            self._outbox.has_lost = True

    # -- loading ----------------------------------------------------------------------------------------------

    async def _load(self, *, catches_up: bool = False) -> None:
        """Load the written beliefs about fresh and stale pods. Also process messages if pods are stale or fresh, or to
        catch up."""
        fresh = frozenset(self._fresh)
        stale, self._stale = self._stale, {}
        pods = sorted(fresh | stale.keys())
        for start in range(0, len(pods), SNAPSHOTS_AT_A_TIME):
            some = pods[start : start + SNAPSHOTS_AT_A_TIME]
            for pod, data in zip(some, await self._wire.get(some), strict=True):
                await asyncio.sleep(0)  # requests are served between two pods
                if data is not None:
                    self._enter(pod, data, answers=stale.get(pod, False))
                elif pod in fresh and pod in self._pods:
                    self._unfound.add(pod)
        if pods or catches_up:
            now_s = asyncio.get_running_loop().time()
            async for page in self._wire.range(self._clock.there(now_s) - RETAIN_S, self._tail):
                for entry in page:
                    self._take(entry, fresh, {pod: self._void(pod) for pod in stale}, is_past=True)
                await asyncio.sleep(0)
        self._fresh -= fresh
        if self._unfound:
            self._wishes.setdefault(ANY_LIFE, asyncio.get_running_loop().time() + WISH_S)
        self._changed.set()

    def _enter(self, pod: PodId, data: bytes, *, answers: bool) -> None:
        try:
            snapshot = decode_snapshot(data)
        except DecodeError as error:
            if isinstance(error, UnknownVersion):
                self._unknown += 1
            else:
                self._refused += 1
            self._complain(f"pod {pod}: {error}")
            return
        if pod not in self._pods or not self._sink.knows(pod):
            return
        if snapshot.stride != self._stride:
            self._refused += 1
            self._complain(
                f"the beliefs about pod {pod} have prefix keys every {snapshot.stride} bytes, this gateway every "
                f"{self._stride}: start all gateways with the same --stride"
            )
            return
        now_s = asyncio.get_running_loop().time()
        since_s = self._void(pod)
        runs = [(min(now_s, self._clock.here(at_s)), keys) for at_s, keys in snapshot.runs]
        runs = [(at_s, keys) for at_s, keys in runs if at_s > since_s]
        if runs:
            self._sink.assume(pod, runs)
            self._told.add(pod)
            self._plan.changed(pod, now_s)
            self._plan.written(pod, now_s)
        if answers:
            told = {key for _, keys in snapshot.runs for key in keys}
            if any(not told.issuperset(keys) for _, keys in self._sink.assumed(pod) or ()):
                self._plan.answer(pod, now_s)

    def _void(self, pod: PodId) -> float:
        """Return the time before which all beliefs about the pod are void."""
        return max(self._void_s.get(pod, -math.inf), self._outbox.forgotten_s.get(pod, -math.inf))

    def _make_wishes(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for life, due_s in list(self._wishes.items()):
            if now_s < due_s:
                continue
            del self._wishes[life]
            if life == ANY_LIFE:
                self._unfound = {pod for pod in self._unfound if self._sink.knows(pod)}
                if not self._unfound or not len(self._others):
                    continue
            self._outbox.wish(life, now_s)

    # -- trouble ----------------------------------------------------------------------------------------------

    def _complain(self, text: str) -> None:
        now_s = asyncio.get_running_loop().time()
        self._complaint = text
        if now_s - self._complaints.get(text, -math.inf) > COMPLAINT_S:
            if len(self._complaints) > 64:
                self._complaints.clear()
            self._complaints[text] = now_s
            log.error("gateways: %s", text)
