"""The engine's side of the registry: publishes the cache's contents to Redis in small batches that never delay a step.

Each model has one capped Redis Stream for every pod's deltas. Each pod's snapshot is a string whose TTL is its lease.
A reader that misses a delta sees the gap in `seq` and loads the snapshot (router/registry/reader.py).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from redis.asyncio import Redis

from engine.cache.changes import KeyChanges
from engine.common.redis_client import REDIS_DEADLINE_S, REDIS_ERRORS, connect, drop_connections
from engine.common.redis_loop import Outage, keep_trying
from engine.contract.events import Keys, MessageKind, RegistryMessage, Tier, encode
from engine.contract.fetch_costs import pack_fetch_costs
from engine.contract.keys import PrefixKey
from engine.contract.load import LoadReport
from engine.contract.periods import Periods, periods
from engine.contract.redis_keys import (
    STREAM_DATA_FIELD,
    STREAM_FETCH_FIELD,
    STREAM_POD_FIELD,
    resync_key,
    snapshot_key,
    stream_key,
)
from engine.loop.metrics import RegistryState

log = logging.getLogger(__name__)

BATCH_KEYS = 512
HEARTBEATS_A_LEASE = 1 / 3
"""Heartbeats come at least once in this share of a lease, in a fleet of any size: a pod silent for a lease is
dropped."""
MAX_BACKOFF_S = 2.0
FLEET_REMEMBERED_S = 60.0
"""If gateways report fleets of different sizes, the largest one reported within this time counts."""
STREAM_TTL_S = 3600
"""Redis drops a model's stream after this time without a publisher."""


@dataclass(slots=True)
class PublisherStats:
    """Counters since the start."""

    deltas: int = 0
    snapshots: int = 0
    dropped_keys: int = 0
    """Keys of backlogs dropped for a fresh snapshot."""
    failures: int = 0


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose keys the messages carry, and how the keys are made."""

    model: str
    pod_id: str
    epoch: int
    """Grows with each start of the engine."""
    stride: int
    """Bytes between two keys of a prompt."""


class Publisher:
    """Publishes one engine's held prefix keys and load.

    `load` and `held` return the present state and are called on the event loop, between steps. `max_pending_keys`
    bounds the queue: a longer backlog is dropped, and a snapshot replaces it.
    """

    def __init__(
        self,
        redis_url: str,
        origin: Origin,
        *,
        lease_s: float,
        load: Callable[[], LoadReport],
        held: Callable[[], tuple[Keys, Keys, Keys]],
        max_pending_keys: int = 200_000,
    ) -> None:
        self._redis_url = redis_url
        self._origin = origin
        self._lease_s = lease_s
        self._load = load
        self._held = held
        self._max_pending_keys = max_pending_keys
        self._pending: dict[PrefixKey, Tier | None] = {}
        self._sent_occupancy = _occupancy(LoadReport())
        self._seq = 0
        self._needs_snapshot = True
        self._snapshot_seq = 0
        self._snapshot_at_s = 0.0
        self._renewed_at_s = -math.inf
        self._periods = Periods()
        self._fleet_pods = 0
        self._fleet_heard_at_s = -math.inf
        self._wake = asyncio.Event()
        self._full = asyncio.Event()
        self._outage = Outage(log, "registry", "gateways hear nothing from this engine until it answers")
        self.stats = PublisherStats()

    def offer(self, changes: KeyChanges) -> None:
        """Queue changes. Never blocks. A later change of a key replaces an earlier one that was not sent."""
        pending = self._pending
        for key in changes.removed:
            pending.pop(key, None)
            pending[key] = None
        for key, tier in changes.stored:
            pending.pop(key, None)
            pending[key] = tier
        if len(pending) > self._max_pending_keys:
            self.stats.dropped_keys += len(pending)
            pending.clear()
            self._needs_snapshot = True
        if pending:
            self._wake.set()
        if len(pending) >= BATCH_KEYS:
            self._full.set()

    def follow_pace(self, pods: int) -> None:
        """Adapt the pace to a gateway that follows `pods` engines: the more engines, the less often each publishes."""
        now_s = asyncio.get_running_loop().time()
        if pods >= self._fleet_pods or now_s - self._fleet_heard_at_s > FLEET_REMEMBERED_S:
            self._fleet_heard_at_s = now_s
            if pods != self._fleet_pods:
                pace = periods(pods)
                often_enough_s = max(Periods().heartbeat_s, self._lease_s * HEARTBEATS_A_LEASE)
                self._fleet_pods = pods
                self._periods = replace(pace, heartbeat_s=min(pace.heartbeat_s, often_enough_s))

    def state(self) -> RegistryState:
        """Return the state of publishing."""
        return RegistryState(
            configured=True, connected=self.connected, pending_keys=len(self._pending), **asdict(self.stats)
        )

    @property
    def connected(self) -> bool:
        """Whether the last message reached Redis."""
        return self._outage.is_connected

    async def run(self) -> None:
        """Publish until cancelled. No failure ends it. On cancellation it gives up the lease."""
        redis = connect(self._redis_url)

        async def step() -> None:
            try:
                async with asyncio.timeout(2 * REDIS_DEADLINE_S):
                    await self._flush(redis)
            except Exception:
                self.stats.failures += 1
                self._needs_snapshot = True
                raise
            self._outage.succeeded()
            await self._wait_for_work()

        try:
            await keep_trying(step, self._outage, partial(drop_connections, redis), longest_pause_s=MAX_BACKOFF_S)
        finally:
            self._outage.is_connected = False
            try:
                async with asyncio.timeout(REDIS_DEADLINE_S):
                    await redis.delete(snapshot_key(self._origin.model, self._origin.pod_id))
            except REDIS_ERRORS:
                log.info("registry: Redis is away; the lease ends by itself")
            await redis.aclose()

    async def _wait_for_work(self) -> None:
        """Wait until a batch is full, its first change is old enough, the load has changed, or the heartbeat or a
        snapshot is due."""
        pace = self._periods
        clock = asyncio.get_running_loop().time
        heartbeat_at_s = clock() + pace.heartbeat_s
        while not self._wake.is_set():
            if self._needs_snapshot:
                return
            try:
                async with asyncio.timeout(min(pace.load_s, heartbeat_at_s - clock())):
                    await self._wake.wait()
            except TimeoutError:
                is_due = clock() >= heartbeat_at_s
                if is_due or _occupancy(self._load()) != self._sent_occupancy:
                    return
        try:
            async with asyncio.timeout(pace.batch_s):
                await self._full.wait()
        except TimeoutError:
            return

    async def _flush(self, redis: Redis) -> None:
        now_s = asyncio.get_running_loop().time()
        stale = self._seq != self._snapshot_seq and now_s - self._snapshot_at_s > self._periods.snapshot_s
        if self._needs_snapshot or stale:
            await self._write_snapshot(redis, skip=self._needs_snapshot)
        await self._append_delta(redis)

    async def _write_snapshot(self, redis: Redis, *, skip: bool) -> None:
        """Write a snapshot. `skip`: a delta was lost, so one `seq` is left out: every reader sees the gap and takes the
        snapshot."""
        if skip:
            self._seq += 1
            self._pending.clear()
        self._needs_snapshot = False
        message = RegistryMessage(
            MessageKind.SNAPSHOT, self._origin.stride, self._origin.epoch, self._seq, self._load(), (), self._held()
        )
        self._snapshot_seq, self._snapshot_at_s = self._seq, asyncio.get_running_loop().time()
        data = await asyncio.to_thread(encode, message)
        async with redis.pipeline(transaction=False) as pipe:
            pipe.set(snapshot_key(self._origin.model, self._origin.pod_id), data, px=int(self._lease_s * 1000))
            pipe.expire(stream_key(self._origin.model), STREAM_TTL_S)
            await pipe.execute()
        self.stats.snapshots += 1

    async def _append_delta(self, redis: Redis) -> None:
        pending, self._pending = self._pending, {}
        self._wake.clear()
        self._full.clear()
        self._seq += 1
        stored: tuple[list[PrefixKey], ...] = ([], [], [])
        removed = []
        for key, tier in pending.items():
            if tier is None:
                removed.append(key)
            else:
                stored[tier].append(key)
        gpu, host, disk = map(tuple, stored)
        load = self._load()
        self._sent_occupancy = _occupancy(load)
        message = RegistryMessage(
            MessageKind.DELTA,
            self._origin.stride,
            self._origin.epoch,
            self._seq,
            load,
            tuple(removed),
            (gpu, host, disk),
        )
        entry: dict[Any, Any] = {STREAM_POD_FIELD: self._origin.pod_id.encode(), STREAM_DATA_FIELD: encode(message)}
        if fetch := pack_fetch_costs(load.fetch):
            entry[STREAM_FETCH_FIELD] = fetch
        now_s = asyncio.get_running_loop().time()
        renews = now_s - self._renewed_at_s >= self._periods.renewal_s
        async with redis.pipeline(transaction=False) as pipe:
            pipe.xadd(stream_key(self._origin.model), entry, maxlen=self._periods.stream_entries, approximate=True)
            if renews:
                pipe.pexpire(snapshot_key(self._origin.model, self._origin.pod_id), int(self._lease_s * 1000))
                pipe.getdel(resync_key(self._origin.model, self._origin.pod_id))
            appended, *answers = await pipe.execute(raise_on_error=False)
        if isinstance(error := appended, Exception) or (answers and isinstance(error := answers[0], Exception)):
            raise error
        self.stats.deltas += 1
        if renews:
            self._renewed_at_s = now_s
            leased, wanted = answers
            if isinstance(wanted, Exception):  # somebody has put something else there; else it would stay for ever
                await redis.delete(resync_key(self._origin.model, self._origin.pod_id))
            if not leased or wanted is not None:
                self._needs_snapshot = True


def _occupancy(load: LoadReport) -> tuple[int, int, int]:
    """Return the part of a load report whose change makes the report worth sending."""
    return load.running, load.waiting, load.uncached_tokens
