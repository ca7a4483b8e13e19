"""The gateway's side of the registry: snapshots, then the stream, into the index in memory. No request waits for it.

The tail is the id of the last stream entry that was read; it does not move during a load. A load reads the pod's
snapshot, then replays the pod's entries after the snapshot up to the tail. So no entry is missed or applied twice.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from redis.asyncio import Redis

from engine.common.redis_client import raise_if_cancelled
from engine.common.redis_loop import Outage, keep_trying
from engine.contract.events import DecodeError, Decoder, MessageKind, RegistryMessage, UnknownVersion
from engine.contract.load import LoadReport
from engine.contract.periods import SMALL_FLEET
from engine.contract.redis_keys import resync_key, snapshot_key, stream_key
from router.registry.feed import PodFeed, Verdict
from router.registry.index import PrefixIndex
from router.registry.stream import READ_ENTRIES, Delta, open_stream, read_new, read_range
from router.views.types import PodId

log = logging.getLogger(__name__)

POLL_MS = 100
PAUSE_S = 0.025
"""The longest pause in a large fleet, in which new messages gather: a read costs as much as ten messages."""
REPLAY_S = 15.0
REPLAY_ENTRIES = 1_000_000
LOADS_AT_A_TIME = 512
"""Pods that are loaded before the stream is read again: if more were loaded, the stream might be trimmed meanwhile."""
SNAPSHOTS_AT_A_TIME = 8
"""Snapshots in memory together: some MB each, 32 MiB at worst."""
RETRY_S = 0.5
"""Seconds until a pod's snapshot is looked for again. In a large fleet, pods that were never heard wait longer."""
EXPIRE_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class RegistryStatus:
    """The registry as an operator sees it."""

    connected: bool
    pods_known: int
    pods_synced: int
    expired: bool
    messages: int
    resyncs: int
    last_error: str | None
    refused: int = 0
    """Messages that could not be decoded or had absurd numbers."""
    unknown: int = 0
    """Messages of another version, which were skipped."""


class RegistryReader:
    """Keeps `index` equal to what the engines hold, through Redis. It survives every failure of Redis.

    `on_load` gets each load report. `on_life` gets each pod that has just published, and its epoch. A pod silent for
    `lease_s` is dropped from the index.
    """

    def __init__(
        self,
        redis_url: str,
        index: PrefixIndex,
        on_load: Callable[[PodId, LoadReport], None],
        *,
        stride: int,
        lease_s: float,
        on_life: Callable[[PodId, int], None] = lambda pod, epoch: None,
    ) -> None:
        self._redis_url = redis_url
        self._index = index
        self._on_load = on_load
        self._on_life = on_life
        self._decoder = Decoder()
        self._stride = stride
        self._lease_s = lease_s
        self._feeds: dict[PodId, PodFeed] = {}
        self._tails: dict[str, bytes] = {}
        self._heard_at_s = 0.0
        self._applied_at_s = -math.inf
        """When a followed pod was last heard; -inf (not known) after a pod has gone."""
        self._expire_at_s = 0.0
        self._changed = asyncio.Event()
        self._messages = 0
        self._resyncs = 0
        self._refused = 0
        self._unknown = 0
        self._outage = Outage(log, "registry", "routing goes on with what is known")

    # -- what the rest of the gateway calls -------------------------------------------------------------------

    def set_pods(self, pods: Mapping[PodId, str]) -> None:
        """Set the pods of the fleet and their models. Pods that are not among them leave the index."""
        for pod in self._feeds.keys() - pods.keys():
            del self._feeds[pod]
            self._index.drop(pod)
            self._applied_at_s = -math.inf
        for pod, model in pods.items():
            feed = self._feeds.get(pod)
            if feed is None or feed.model != model:
                self._feeds[pod] = PodFeed(model)
                if feed is not None:
                    self._index.drop(pod)  # keys of another model

    async def wait_warm(self, timeout_s: float) -> bool:
        """Wait until every known pod's snapshot is loaded or known to be absent. False: Redis did not answer in
        time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not all(feed.looked for feed in self._feeds.values()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def reports(self, pod: PodId) -> bool:
        """Return whether this pod has published something since it joined the fleet."""
        feed = self._feeds.get(pod)
        return feed is not None and feed.ever_synced

    @property
    def expired(self) -> bool:
        """True if pods have published but every lease has run out: then the index says nothing any more."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._applied_at_s <= self._lease_s:
            return False
        feeds = [feed for feed in self._feeds.values() if feed.ever_synced]
        return bool(feeds) and all(feed.is_expired(now_s, self._lease_s) for feed in feeds)

    def status(self) -> RegistryStatus:
        """Return counters and state. A fault of a pod's messages is shown for a lease."""
        now_s = asyncio.get_running_loop().time()
        complaints = [f.complaint for f in self._feeds.values() if now_s - f.complained_at_s < self._lease_s]
        return RegistryStatus(
            connected=self._outage.is_connected,
            pods_known=len(self._feeds),
            pods_synced=sum(feed.synced for feed in self._feeds.values()),
            expired=self.expired,
            messages=self._messages,
            resyncs=self._resyncs,
            refused=self._refused,
            unknown=self._unknown,
            last_error=self._outage.last_error or next(filter(None, complaints), None),
        )

    async def run(self) -> None:
        """Follow the registry until cancelled."""
        await keep_trying(self._follow, self._outage, self._lost)

    async def _lost(self) -> None:
        """Note that Redis is away: leases run out."""
        self._expire()

    # -- one connection ---------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Follow Redis until nothing has been heard for a lease; the caller then connects anew. By then the address may
        lead to another server. Or Redis lost the stream, its clock is behind, and new entries get ids below the
        tail."""
        clock = asyncio.get_running_loop().time
        self._heard_at_s = clock()
        async with open_stream(self._redis_url) as redis:
            self._tails.clear()
            for feed in self._feeds.values():
                feed.lost()  # the stream may have been trimmed meanwhile, or Redis replaced
                feed.retry_at_s = 0.0
            await redis.ping()
            while clock() - self._heard_at_s <= self._lease_s:
                raise_if_cancelled()
                await self._load_missing(redis)
                is_behind = await self._read(redis)
                self._outage.succeeded()
                if clock() >= self._expire_at_s:
                    self._expire()
                if not is_behind and len(self._feeds) > SMALL_FLEET:
                    await asyncio.sleep(PAUSE_S * (1 - SMALL_FLEET / len(self._feeds)))

    async def _read(self, redis: Redis) -> bool:
        """Read and apply what is new. True: there is more."""
        if not self._tails:
            await asyncio.sleep(POLL_MS / 1000)
            await redis.ping()
            return False
        is_behind = False
        for model, tail, deltas in await read_new(redis, self._tails, POLL_MS):
            self._tails[model] = tail
            is_behind |= len(deltas) == READ_ENTRIES
            for delta in deltas:
                self._take(delta)
        return is_behind

    def _take(self, delta_of_pod: Delta) -> None:
        """Process one new delta."""
        name, data, fetch = delta_of_pod
        pod = PodId(name.decode(errors="replace"))
        feed = self._feeds.get(pod)
        if feed is None:
            return
        try:
            delta = self._decode(pod, data, fetch)
        except UnknownVersion as error:
            self._pass_over(pod, feed, error)
            return
        if delta is None:
            feed.lost()
            return
        verdict = feed.judge(delta)
        if verdict is Verdict.APPLY:
            self._apply(pod, feed, delta)
            self._on_life(pod, delta.epoch)
        elif verdict is Verdict.RESYNC and not feed.synced:
            feed.retry_at_s = min(feed.retry_at_s, asyncio.get_running_loop().time() + RETRY_S)
        elif verdict is Verdict.RESYNC:
            self._resyncs += 1
            if delta.epoch == feed.epoch:
                feed.lost()
            else:
                self._met(pod, feed, delta)
                self._index.drop(pod)  # the engine has restarted: its cache began empty
                feed.began_anew()

    def _met(self, pod: PodId, feed: PodFeed, message: RegistryMessage) -> None:
        """Complain if an old epoch comes back: two engines with one id make the reader load the pod again and again."""
        if message.epoch == feed.left_epoch:
            self._complain(pod, f"two engines publish as pod {pod}: give each its own --pod-id")

    def _apply(self, pod: PodId, feed: PodFeed, message: RegistryMessage) -> None:
        if message.kind is MessageKind.SNAPSHOT:
            self._index.replace(pod, message.stored)
        else:
            self._index.apply(pod, message.removed, message.stored)
        self._heard_at_s = self._applied_at_s = asyncio.get_running_loop().time()
        feed.applied(message, self._heard_at_s)
        self._messages += 1
        self._on_load(pod, message.load)

    def _pass_over(self, pod: PodId, feed: PodFeed, error: UnknownVersion) -> None:
        """Skip a message of another version: the pod counts as one that publishes nothing. In a rollout, gateways of
        the engine's release follow that engine."""
        self._unknown += 1
        if not feed.is_unreadable:
            log.warning("registry: pod %s: %s; it counts as an engine that publishes nothing", pod, error)
            self._index.drop(pod)
            feed.became_unreadable()
        feed.retry_at_s = asyncio.get_running_loop().time() + self._lease_s

    def _decode(self, pod: PodId, data: bytes, fetch: bytes = b"") -> RegistryMessage | None:
        """Return the message, or None if it is not valid. Raises UnknownVersion."""
        try:
            message = self._decoder.decode(data, fetch)
        except UnknownVersion:
            raise
        except DecodeError as error:
            self._refused += 1
            self._complain(pod, f"pod {pod}: {error}")
            return None
        if message.stride != self._stride:
            self._complain(
                pod,
                f"pod {pod} computes prefix keys every {message.stride} bytes, this gateway every {self._stride}: "
                "start both with the same --stride",
            )
            return None
        return message

    # -- snapshots --------------------------------------------------------------------------------------------

    async def _load_missing(self, redis: Redis) -> None:
        now_s = asyncio.get_running_loop().time()
        missing = (item for item in self._feeds.items() if not item[1].synced and now_s >= item[1].retry_at_s)
        due: dict[str, list[PodId]] = {}
        for pod, feed in islice(missing, LOADS_AT_A_TIME):
            due.setdefault(feed.model, []).append(pod)
        for model, pods in due.items():
            if model not in self._tails:
                self._tails[model] = await _last_id(redis, model)
            await self._load(redis, model, pods)
        if due:
            self._changed.set()

    async def _load(self, redis: Redis, model: str, pods: list[PodId]) -> None:
        replay: dict[PodId, list[Delta]] | None = None
        for start in range(0, len(pods), SNAPSHOTS_AT_A_TIME):
            found = await self._snapshots(redis, model, pods[start : start + SNAPSHOTS_AT_A_TIME])
            if found and replay is None:
                replay = await self._recent(redis, model, pods)
            for pod, data in found.items():
                await asyncio.sleep(0)  # requests are served between two pods
                feed = self._feeds.get(pod)
                if feed is not None and feed.model == model:
                    await self._enter(redis, pod, feed, data, (replay or {}).pop(pod, []))

    async def _snapshots(self, redis: Redis, model: str, pods: list[PodId]) -> dict[PodId, bytes]:
        """Return the snapshots that exist, encoded."""
        snapshots: list[Any] = await redis.mget([snapshot_key(model, pod) for pod in pods])
        found = {}
        now_s = asyncio.get_running_loop().time()
        unheard_s = RETRY_S * max(1.0, len(self._feeds) / SMALL_FLEET)
        for pod, data in zip(pods, snapshots, strict=True):
            feed = self._feeds.get(pod)
            if feed is None or feed.model != model:
                continue
            if data is None:
                feed.looked = True
                feed.retry_at_s = now_s + (RETRY_S if feed.ever_synced else min(self._lease_s, unheard_s))
            else:
                feed.retry_at_s = now_s + RETRY_S
                found[pod] = data
        return found

    async def _enter(self, redis: Redis, pod: PodId, feed: PodFeed, data: bytes, deltas: Sequence[Delta]) -> None:
        """Enter one pod's snapshot, then the deltas after it."""
        try:
            snapshot = self._decode(pod, data)
            if snapshot is not None:
                self._met(pod, feed, snapshot)
                self._apply(pod, feed, snapshot)
                self._replay(pod, feed, deltas)
        except UnknownVersion as error:
            self._pass_over(pod, feed, error)
            return
        feed.looked = True
        if snapshot is None:  # it stays refused until the engine changes; a good delta leads to an earlier look
            feed.retry_at_s = asyncio.get_running_loop().time() + self._lease_s
        elif not feed.synced:
            await redis.set(resync_key(feed.model, pod), b"1", px=int(REPLAY_S * 1000))

    def _replay(self, pod: PodId, feed: PodFeed, deltas: Sequence[Delta]) -> None:
        """Apply what came after the snapshot that was just applied."""
        epoch = feed.epoch
        for _, data, fetch in deltas:
            try:
                delta = self._decode(pod, data, fetch)
            except UnknownVersion:
                self._unknown += 1
                continue
            # Entries of an earlier epoch that are still in the stream say nothing about this one.
            if delta is None or delta.epoch != epoch:
                continue
            verdict = feed.judge(delta)
            if verdict is Verdict.APPLY:
                self._apply(pod, feed, delta)
            elif verdict is Verdict.RESYNC:
                feed.lost()

    async def _recent(self, redis: Redis, model: str, pods: Sequence[PodId]) -> dict[PodId, list[Delta]]:
        """Return the pods' deltas of the last REPLAY_S seconds, up to the tail's position, encoded."""
        seconds, _ = await redis.time()
        since_ms = max(0, int((seconds - REPLAY_S) * 1000))
        by_name: dict[bytes, list[Delta]] = {pod.encode(): [] for pod in pods}
        seen = 0
        async for page in read_range(redis, model, since_ms, self._tails[model]):
            for delta in page:
                if (deltas := by_name.get(delta[0])) is not None:
                    deltas.append(delta)
            seen += len(page)
            if seen >= REPLAY_ENTRIES:
                break
        return {pod: by_name[pod.encode()] for pod in pods}

    # -- time and trouble -------------------------------------------------------------------------------------

    def _expire(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._expire_at_s = now_s + EXPIRE_EVERY_S
        for pod, feed in self._feeds.items():
            if feed.is_expired(now_s, self._lease_s) and feed.epoch is not None:
                log.warning(
                    "registry: pod %s has been silent for its lease of %g s; its entries are dropped",
                    pod,
                    self._lease_s,
                )
                self._index.drop(pod)
                feed.lost()
                feed.epoch = None

    def _complain(self, pod: PodId, text: str) -> None:
        feed = self._feeds.get(pod)
        if feed is not None and feed.complain(text, asyncio.get_running_loop().time(), self._lease_s):
            log.error("registry: %s", text)


async def _last_id(redis: Redis, model: str) -> bytes:
    newest: Any = await redis.xrevrange(stream_key(model), count=1)
    return bytes(newest[0][0]) if newest else b"0-0"
