"""What all readers of streams in Redis have in common: snapshots, then the streams' entries, and again after a gap.

A stream's tail is the id of the last entry that was read; it does not move during a load. A load reads snapshots, then
replays the entries after them up to the tail. So no entry is missed, and none has an effect twice. No request waits.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence

from engine.common.redis_client import raise_if_cancelled
from engine.common.redis_loop import Outage, keep_trying
from engine.contract.events import DecodeError, UnknownVersion
from router.registry.wire import READ_ENTRIES, Entry, Wire

log = logging.getLogger(__name__)

POLL_MS = 100
SNAPSHOTS_AT_A_TIME = 8
"""Snapshots in memory together: some MB each, 32 MiB at worst."""
MAX_COMPLAINTS = 16_384


class StreamReader(ABC):
    """Follows streams in `wire` while `run` runs. It survives every failure of Redis."""

    def __init__(self, subject: str, wire: Wire, meanwhile: str, *, silence_s: float, complaint_s: float) -> None:
        """`subject`: what is read, for the log. `meanwhile`: see `Outage`. `silence_s`: if nothing comes for so long,
        the reader connects anew: the address may lead to another server by then. Or Redis lost a stream, its clock is
        behind, and new entries get ids below the tail. `complaint_s`: how often the same complaint is logged."""
        self._subject = subject
        self._wire = wire
        self._outage = Outage(log, subject, meanwhile)
        self._silence_s = silence_s
        self._complaint_s = complaint_s
        self._tails: dict[str, bytes] = {}
        self._heard_at_s = 0.0
        self._loaded = asyncio.Event()
        """Set after each load."""
        self._complaints: dict[str, float] = {}
        """What was logged -> when it was last found, the latest last."""
        self._refused = 0
        """Messages that could not be decoded, had absurd numbers, or another stride."""
        self._unknown = 0
        """Messages of another version, which were skipped."""

    async def run(self) -> None:
        """Follow the streams until cancelled."""
        try:
            await keep_trying(self._follow, self._outage, self._lost)
        finally:
            await self._wire.close()

    async def wait_warm(self, timeout_s: float) -> bool:
        """Wait until everything that Redis has about every known pod is loaded. False: not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._is_warm():
                    self._loaded.clear()
                    await self._loaded.wait()
        except TimeoutError:
            return False
        return True

    async def _follow(self) -> None:
        """Follow Redis until nothing was heard for `silence_s`."""
        clock = asyncio.get_running_loop().time
        self._heard_at_s = clock()
        self._tails.clear()
        await self._begin()
        while clock() - self._heard_at_s <= self._silence_s:
            raise_if_cancelled()
            await self._load()
            is_behind = False
            if not self._tails:
                await asyncio.sleep(POLL_MS / 1000)
                await self._wire.time()
            for stream, entries in await self._wire.read(self._tails, POLL_MS) if self._tails else ():
                self._tails[stream] = entries[-1][0]
                is_behind |= len(entries) >= READ_ENTRIES
                self._take(stream, entries)
            self._outage.succeeded()
            await self._tick(clock())
            if not is_behind:
                await asyncio.sleep(self._pause_s(clock()))
        for stream in self._tails:
            await self._wire.revive(stream)
        await self._lost()

    async def _lost(self) -> None:
        """Note that the connection is lost, or may lead to the wrong server."""
        await self._wire.reset()

    async def _snapshots(self, keys: Sequence[str]) -> AsyncIterator[tuple[int, bytes | None]]:
        """Yield the strings with their places in `keys`, a few in memory at a time."""
        for start in range(0, len(keys), SNAPSHOTS_AT_A_TIME):
            for at, data in enumerate(await self._wire.get(keys[start : start + SNAPSHOTS_AT_A_TIME]), start):
                await asyncio.sleep(0)  # requests are served between two pods
                yield at, data

    def _refuse(self, about: str, error: DecodeError) -> None:
        """Count a message that is skipped, and log why, once."""
        if isinstance(error, UnknownVersion):
            self._unknown += 1
        else:
            self._refused += 1
        self._complain(f"{about}: {error}")

    def _complain(self, text: str) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._complaints.pop(text, -math.inf) > self._complaint_s:
            log.error("%s: %s", self._subject, text)
        if len(self._complaints) >= MAX_COMPLAINTS:
            self._complaints.clear()
        self._complaints[text] = now_s

    def _last_error(self) -> str | None:
        """Return the present outage, or the latest complaint of the last `complaint_s`; None: all is well."""
        now_s = asyncio.get_running_loop().time()
        recent = [text for text, at_s in self._complaints.items() if now_s - at_s < self._complaint_s]
        return self._outage.last_error or next(reversed(recent), None)

    @abstractmethod
    async def _begin(self) -> None:
        """Prepare a new connection: what was known may be out of date."""

    @abstractmethod
    async def _load(self) -> None:
        """Load what is missing or out of date, and set the tails of streams to follow. Sets `_loaded`."""

    @abstractmethod
    def _take(self, stream: str, entries: Sequence[Entry]) -> None:
        """Process new entries. Sets `_heard_at_s`."""

    @abstractmethod
    async def _tick(self, now_s: float) -> None:
        """Do the recurring work."""

    @abstractmethod
    def _pause_s(self, now_s: float) -> float:
        """Return the seconds until the next read."""

    @abstractmethod
    def _is_warm(self) -> bool:
        """Return whether everything was loaded once."""
