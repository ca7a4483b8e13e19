"""What engines report of themselves, from Redis into the index in memory."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from engine.contract.events import DecodeError, Decoder, MessageKind, RegistryMessage, UnknownVersion
from engine.contract.load import LoadReport
from engine.contract.periods import SMALL_FLEET
from engine.contract.redis_keys import (
    STREAM_DATA_FIELD,
    STREAM_FETCH_FIELD,
    STREAM_POD_FIELD,
    resync_key,
    snapshot_key,
    stream_key,
)
from engine.contract.sequence import Step
from router.registry.cursor import PodCursor
from router.registry.index import PrefixIndex
from router.registry.stream_reader import StreamReader
from router.registry.wire import Entry, RedisWire
from router.views.types import PodId

log = logging.getLogger(__name__)

PAUSE_S = 0.025
"""The longest pause in a large fleet, in which new messages gather: a read costs as much as ten messages."""
REPLAY_S = 15.0
REPLAY_ENTRIES = 1_000_000
LOADS_AT_A_TIME = 512
"""Pods that are loaded before the stream is read again: if more were loaded, the stream might be trimmed meanwhile."""
RETRY_S = 0.5
"""Seconds until a pod's snapshot is looked for again. In a large fleet, pods that were never heard wait longer."""
EXPIRE_EVERY_S = 0.1

Delta = tuple[bytes, bytes, bytes]
"""A pod's id, its encoded message and its encoded fetch costs; empty bytes if the entry lacks one."""


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
    failures: int = 0
    """Times that Redis failed."""


class RegistryReader(StreamReader):
    """Keeps `index` equal to what the engines hold.

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
        super().__init__(
            "registry",
            RedisWire(redis_url),
            "routing goes on with what is known",
            silence_s=lease_s,
            complaint_s=lease_s,
        )
        self._index = index
        self._on_load = on_load
        self._on_life = on_life
        self._decoder = Decoder()
        self._stride = stride
        self._lease_s = lease_s
        self._cursors: dict[PodId, PodCursor] = {}
        self._applied_at_s = -math.inf
        """When a followed pod was last heard; -inf (not known) after a pod has gone."""
        self._expire_at_s = 0.0
        self._messages = 0
        self._resyncs = 0

    # -- what the rest of the gateway calls -------------------------------------------------------------------

    def set_pods(self, pods: Mapping[PodId, str]) -> None:
        """Set the pods of the fleet and their models. Pods that are not among them leave the index."""
        for pod in self._cursors.keys() - pods.keys():
            del self._cursors[pod]
            self._index.drop(pod)
            self._applied_at_s = -math.inf
        for pod, model in pods.items():
            cursor = self._cursors.get(pod)
            if cursor is None or cursor.model != model:
                self._cursors[pod] = PodCursor(model)
                if cursor is not None:
                    self._index.drop(pod)  # keys of another model

    def reports(self, pod: PodId) -> bool:
        """Return whether this pod has published something since it joined the fleet."""
        cursor = self._cursors.get(pod)
        return cursor is not None and cursor.ever_synced

    @property
    def expired(self) -> bool:
        """True if pods have published but every lease has run out: then the index says nothing any more."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._applied_at_s <= self._lease_s:
            return False
        cursors = [cursor for cursor in self._cursors.values() if cursor.ever_synced]
        return bool(cursors) and all(cursor.is_expired(now_s, self._lease_s) for cursor in cursors)

    def status(self) -> RegistryStatus:
        """Return counters and state. A fault of a pod's messages is shown for a lease."""
        return RegistryStatus(
            connected=self._outage.is_connected,
            pods_known=len(self._cursors),
            pods_synced=sum(cursor.synced for cursor in self._cursors.values()),
            expired=self.expired,
            messages=self._messages,
            resyncs=self._resyncs,
            refused=self._refused,
            unknown=self._unknown,
            last_error=self._last_error(),
            failures=self._outage.failures,
        )

    # -- one connection ---------------------------------------------------------------------------------------

    def _is_warm(self) -> bool:
        return all(cursor.looked for cursor in self._cursors.values())

    async def _begin(self) -> None:
        for cursor in self._cursors.values():
            cursor.lost()  # the stream may have been trimmed meanwhile, or Redis replaced
            cursor.retry_at_s = 0.0
        await self._wire.time()

    async def _lost(self) -> None:
        self._expire()
        await super()._lost()

    async def _tick(self, now_s: float) -> None:
        if now_s >= self._expire_at_s:
            self._expire()

    def _pause_s(self, now_s: float) -> float:
        pods = len(self._cursors)
        return PAUSE_S * (1 - SMALL_FLEET / pods) if pods > SMALL_FLEET else 0.0

    def _take(self, stream: str, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._take_delta(_delta(entry[1]))

    def _take_delta(self, delta_of_pod: Delta) -> None:
        """Process one new delta."""
        name, data, fetch = delta_of_pod
        pod = PodId(name.decode(errors="replace"))
        cursor = self._cursors.get(pod)
        if cursor is None:
            return
        try:
            delta = self._decode(pod, data, fetch)
        except UnknownVersion as error:
            self._pass_over(pod, cursor, error)
            return
        if delta is None:
            cursor.lost()
            return
        step = cursor.judge(delta)
        if step is Step.NEXT:
            self._apply(pod, cursor, delta)
            self._on_life(pod, delta.epoch)
        elif step is Step.GAP and not cursor.synced:
            cursor.retry_at_s = min(cursor.retry_at_s, asyncio.get_running_loop().time() + RETRY_S)
        elif step is Step.GAP:
            self._resyncs += 1
            if delta.epoch == cursor.epoch:
                cursor.lost()
            else:
                self._met(pod, cursor, delta)
                self._index.drop(pod)  # the engine has restarted: its cache began empty
                cursor.began_anew()

    def _met(self, pod: PodId, cursor: PodCursor, message: RegistryMessage) -> None:
        """Complain if an old epoch comes back: two engines with one id make the reader load the pod again and again."""
        if message.epoch == cursor.left_epoch:
            self._complain(f"two engines publish as pod {pod}: give each its own --pod-id")

    def _apply(self, pod: PodId, cursor: PodCursor, message: RegistryMessage) -> None:
        if message.kind is MessageKind.SNAPSHOT:
            self._index.replace(pod, message.stored)
        else:
            self._index.apply(pod, message.removed, message.stored)
        self._heard_at_s = self._applied_at_s = asyncio.get_running_loop().time()
        cursor.applied(message, self._heard_at_s)
        self._messages += 1
        self._on_load(pod, message.load)

    def _pass_over(self, pod: PodId, cursor: PodCursor, error: UnknownVersion) -> None:
        """Skip a message of another version: the pod counts as one that publishes nothing. In a rollout, gateways of
        the engine's release follow that engine."""
        self._unknown += 1
        if not cursor.is_unreadable:
            log.warning("registry: pod %s: %s; it counts as an engine that publishes nothing", pod, error)
            self._index.drop(pod)
            cursor.became_unreadable()
        cursor.retry_at_s = asyncio.get_running_loop().time() + self._lease_s

    def _decode(self, pod: PodId, data: bytes, fetch: bytes = b"") -> RegistryMessage | None:
        """Return the message, or None if it is not valid. Raises UnknownVersion."""
        try:
            message = self._decoder.decode(data, fetch)
        except UnknownVersion:
            raise
        except DecodeError as error:
            self._refuse(f"pod {pod}", error)
            return None
        if message.stride != self._stride:
            self._complain(
                f"pod {pod} computes prefix keys every {message.stride} bytes, this gateway every {self._stride}: "
                "both must be of one release",
            )
            return None
        return message

    # -- snapshots --------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        now_s = asyncio.get_running_loop().time()
        missing = (item for item in self._cursors.items() if not item[1].synced and now_s >= item[1].retry_at_s)
        due: dict[str, list[PodId]] = {}
        for pod, cursor in islice(missing, LOADS_AT_A_TIME):
            due.setdefault(cursor.model, []).append(pod)
        for model, pods in due.items():
            if (stream := stream_key(model)) not in self._tails:
                self._tails[stream] = await self._wire.newest(stream)
            await self._load_pods(model, pods)
        if due:
            self._loaded.set()

    async def _load_pods(self, model: str, pods: list[PodId]) -> None:
        replay: dict[PodId, list[Delta]] | None = None
        unheard_s = RETRY_S * max(1.0, len(self._cursors) / SMALL_FLEET)
        async for at, data in self._snapshots([snapshot_key(model, pod) for pod in pods]):
            cursor = self._cursors.get(pod := pods[at])
            if cursor is None or cursor.model != model:
                continue
            now_s = asyncio.get_running_loop().time()
            if data is None:
                cursor.looked = True
                cursor.retry_at_s = now_s + (RETRY_S if cursor.ever_synced else min(self._lease_s, unheard_s))
                continue
            cursor.retry_at_s = now_s + RETRY_S
            if replay is None:
                replay = await self._recent(model, pods)
                cursor = self._cursors.get(pod)  # the fleet may have changed meanwhile
            if cursor is not None and cursor.model == model:
                await self._enter(pod, cursor, data, replay.pop(pod, []))

    async def _enter(self, pod: PodId, cursor: PodCursor, data: bytes, deltas: Sequence[Delta]) -> None:
        """Enter one pod's snapshot, then the deltas after it."""
        try:
            snapshot = self._decode(pod, data)
            if snapshot is not None:
                self._met(pod, cursor, snapshot)
                self._apply(pod, cursor, snapshot)
                self._replay(pod, cursor, deltas)
        except UnknownVersion as error:
            self._pass_over(pod, cursor, error)
            return
        cursor.looked = True
        if snapshot is None:  # it stays refused until the engine changes; a good delta leads to an earlier look
            cursor.retry_at_s = asyncio.get_running_loop().time() + self._lease_s
        elif not cursor.synced:
            await self._wire.put(resync_key(cursor.model, pod), b"1", REPLAY_S)

    def _replay(self, pod: PodId, cursor: PodCursor, deltas: Sequence[Delta]) -> None:
        """Apply what came after the snapshot that was just applied."""
        epoch = cursor.epoch
        for _, data, fetch in deltas:
            try:
                delta = self._decode(pod, data, fetch)
            except UnknownVersion:
                self._unknown += 1
                continue
            # Entries of an earlier epoch that are still in the stream say nothing about this one.
            if delta is None or delta.epoch != epoch:
                continue
            step = cursor.judge(delta)
            if step is Step.NEXT:
                self._apply(pod, cursor, delta)
            elif step is Step.GAP:
                cursor.lost()

    async def _recent(self, model: str, pods: Sequence[PodId]) -> dict[PodId, list[Delta]]:
        """Return the pods' deltas of the last REPLAY_S seconds, up to the tail's position, encoded."""
        stream = stream_key(model)
        since_s = await self._wire.time() - REPLAY_S
        by_name: dict[bytes, list[Delta]] = {pod.encode(): [] for pod in pods}
        seen = 0
        async for page in self._wire.range(stream, since_s, self._tails[stream]):
            for _, fields in page:
                delta = _delta(fields)
                if (deltas := by_name.get(delta[0])) is not None:
                    deltas.append(delta)
            seen += len(page)
            if seen >= REPLAY_ENTRIES:
                break
        return {pod: by_name[pod.encode()] for pod in pods}

    # -- time -------------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._expire_at_s = now_s + EXPIRE_EVERY_S
        for pod, cursor in self._cursors.items():
            if cursor.is_expired(now_s, self._lease_s) and cursor.epoch is not None:
                log.warning(
                    "registry: pod %s has been silent for its lease of %g s; its entries are dropped",
                    pod,
                    self._lease_s,
                )
                self._index.drop(pod)
                cursor.lost()
                cursor.epoch = None


def _delta(fields: Sequence[bytes]) -> Delta:
    if len(fields) == 4 and fields[0] == STREAM_POD_FIELD and fields[2] == STREAM_DATA_FIELD:
        return fields[1], fields[3], b""
    named = dict(zip(fields[::2], fields[1::2], strict=False))  # with fetch costs, or in another order
    return named.get(STREAM_POD_FIELD, b""), named.get(STREAM_DATA_FIELD, b""), named.get(STREAM_FETCH_FIELD, b"")
