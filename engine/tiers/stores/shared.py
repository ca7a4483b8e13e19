"""The shared tier: copies between the tier above and a folder that engines share, and the thread that makes room."""

from __future__ import annotations

import logging
import math
import os
import random
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

from engine.tiers.copies.base import BlockRun, CopyError, Direction, Moved
from engine.tiers.stores.block_file import Label
from engine.tiers.stores.janitor import Janitor
from engine.tiers.stores.lookups import ThreadedLookups
from engine.tiers.stores.place import Declined
from engine.tiers.stores.shared_folder import Event, SharedFolder
from engine.tiers.stores.stats import SharedSize

log = logging.getLogger(__name__)

KNOWN_BLOCKS = 2**18
"""Blocks of a folder that an engine keeps in its index. It looks up others in the folder."""
SWEEP_S = 60.0
"""Mean seconds between an engine's checks whether room has to be made."""
SWEEP_SHARE = 1 / 64
"""Share of the folder's bytes: an engine that has written this much checks at once. It may write as much once more if
another engine is making room at that time."""
RETRY_S = 1.0
"""Seconds before an engine that has written `SWEEP_SHARE` checks again, if another engine is making room."""


class UpperBlocks(Protocol):
    """The blocks of the tier above, whose KV is read and written. The methods raise OSError."""

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        ...

    def read(self, block: int, kv: memoryview) -> memoryview:
        """Return a block's KV: a copy in `kv`, or the block's own memory."""
        ...

    def write(self, block: int, fill: Callable[[memoryview], None], kv: memoryview) -> None:
        """Let `fill` write the block's KV, into `kv` or into the block's own memory."""
        ...


class HostBlocks:
    """`UpperBlocks` in host memory."""

    def __init__(self, memory: memoryview, block_bytes: int) -> None:
        self.blocks = len(memory) // block_bytes
        self._memory, self._block_bytes = memory, block_bytes

    def read(self, block: int, kv: memoryview) -> memoryview:
        """See `UpperBlocks.read`."""
        return self._memory[block * self._block_bytes : (block + 1) * self._block_bytes]

    def write(self, block: int, fill: Callable[[memoryview], None], kv: memoryview) -> None:
        """See `UpperBlocks.write`."""
        fill(self.read(block, kv))


@dataclass(slots=True)
class _Described:
    label: Label
    resets: int
    """Number of resets before this was described. What was described before a reset is not stored after it."""


class SharedCopies:
    """A `BlockMover` between blocks of the tier above and files."""

    def __init__(self, folder: SharedFolder, upper: UpperBlocks, slots: int) -> None:
        """`slots`: files that are kept in the index at a time."""
        self.block_bytes, self.pool_blocks, self.host_slots = folder.block_bytes, upper.blocks, slots
        self.written_bytes = 0
        self.sweep_from_bytes: float = math.inf
        """Once this much is written, `on_written` is called, which makes room."""
        self.on_written: Callable[[], None] = _nothing
        self.room_bytes: float = folder.file_bytes
        """Bytes that may be written before the next sweep, so that the folder stays within its limit."""
        self.resets = 0
        self._has_borrowed = False
        self._counting = threading.Lock()  # copies and sweeps have a thread each
        self._folder, self._upper = folder, upper
        self._described: dict[int, _Described] = {}
        self._scratch = {way: memoryview(bytearray(folder.block_bytes)) for way in Direction}

    def describe(self, block: int, label: Label) -> None:
        """Note what the block holds or will hold. Call this before asking for its copy."""
        self._described[block] = _Described(label, self.resets)

    def swept(self, written_before: int, left_bytes: float) -> None:
        """Take note of a sweep. `written_before`: what `written_bytes` was when it began; `left_bytes`: room in the
        folder. The sweep may have missed bytes that were written while it ran, so they stay counted."""
        with self._counting:
            self.written_bytes -= written_before
            self.room_bytes = left_bytes - self.written_bytes
            self._has_borrowed = False

    def borrow(self, room_bytes: float) -> None:
        """Take this much room until this engine's next sweep, because another engine is making room. A second call
        before that sweep changes nothing: the folder must not grow further if that engine keeps its lock for ever."""
        with self._counting:
            if not self._has_borrowed:
                self._has_borrowed = True
                self.room_bytes = max(self.room_bytes, room_bytes)

    def move(self, run: BlockRun) -> Moved:
        """See `BlockMover.move`."""
        start_s = time.perf_counter()
        moved = 0
        try:
            for pair in run.pairs:
                if run.direction is Direction.DEMOTE:
                    moved += self._store(pair.source, pair.target)
                else:
                    self._load(pair.source, pair.target)
                    moved += 1
        except OSError as error:
            raise CopyError(f"{type(error).__name__}: {error}") from error
        # Files that existed before say nothing about how fast files are written.
        return Moved(moved, time.perf_counter() - start_s if moved else 0.0)

    def _store(self, block: int, target: int) -> int:
        described = self._of(target)
        if described.resets != self.resets:
            raise Declined("the cache was reset meanwhile")
        if self.room_bytes < self._folder.file_bytes:
            self._folder.events[Event.FULL] += 1
            self.on_written()
            raise Declined("the shared folder is full until room is made")
        kv = self._upper.read(block, self._scratch[Direction.DEMOTE])
        if not self._folder.store(described.label, kv):
            return 0
        with self._counting:
            self.written_bytes += self._folder.file_bytes
            self.room_bytes -= self._folder.file_bytes
        if self.written_bytes >= self.sweep_from_bytes:
            self.on_written()
        return 1

    def _load(self, source: int, block: int) -> None:
        label = self._of(source).label
        self._upper.write(block, lambda kv: self._folder.load(label, kv), self._scratch[Direction.PROMOTE])

    def _of(self, block: int) -> _Described:
        described = self._described.get(block)
        if described is None:
            raise Declined("nothing is known about the block")
        return described


def _nothing() -> None:
    """Make no room."""


@dataclass(eq=False)
class OpenShared:
    """A shared tier's folder, with a thread that makes room in it from time to time."""

    folder: SharedFolder
    copies: SharedCopies
    max_bytes: int
    held_bytes: int = 0
    """Bytes in the folder as of the last sweep of this engine."""
    lookups: ThreadedLookups = field(init=False)
    clears: int = 0
    """Number of resets that have not reached the folder yet. Nothing is looked up meanwhile."""
    _jobs: SimpleQueue[str] = field(default_factory=SimpleQueue)
    _again_at_s: float = 0.0
    """Until this time of the monotonic clock, no write asks for a sweep."""

    def __post_init__(self) -> None:
        self.lookups = ThreadedLookups(self.folder.leading, lambda: not self.clears)

    def describe(self, block: int, label: Label) -> None:
        """See `SharedCopies.describe`."""
        self.copies.describe(block, label)

    def size(self) -> SharedSize:
        """Return what the folder holds, as far as is known."""
        events = {event.value: self.folder.events[event] for event in Event}
        return SharedSize(self.max_bytes, self.held_bytes + self.copies.written_bytes, events)

    def start(self) -> None:
        """Start the thread that makes room. Blocks while it sweeps the folder once."""
        self._sweep()
        self.copies.sweep_from_bytes = SWEEP_SHARE * self.max_bytes
        self.copies.on_written = self._ask_for_sweep
        threading.Thread(target=self._work, name="shared-tier-janitor", daemon=True).start()

    def reset(self) -> None:
        """Move the folder's blocks of this model out of reach of all engines. Does not wait."""
        self.copies.resets += 1
        self.clears += 1
        self._jobs.put("clear")

    def close(self) -> None:
        """End the threads, without waiting for them."""
        self.lookups.close()
        self._jobs.put("end")

    def _ask_for_sweep(self) -> None:
        if self._jobs.empty() and time.monotonic() >= self._again_at_s:
            self._jobs.put("sweep")

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=SWEEP_S * random.uniform(0.5, 1.5))
            except Empty:
                job = "sweep"
            if job == "end":
                return
            if job == "clear":
                self._clear()
            else:
                self._sweep()

    def _clear(self) -> None:
        try:
            self.folder.forget_all()
        except OSError as error:
            # The blocks are as valid as before, but the operator who wanted them gone has to know.
            log.error("shared tier: %s cannot be reset: %s", self.folder.path, error)
        self.clears -= 1

    def _sweep(self) -> None:
        before = self.copies.written_bytes
        try:
            janitor = Janitor(self.folder.root, self.max_bytes, self.folder.writer, file_bytes=self.folder.file_bytes)
            swept = janitor.sweep()
        except OSError as error:
            log.warning("shared tier: no room can be made in %s: %s", self.folder.root, error)
            return
        if swept is None:  # another engine is sweeping; the room it makes will last for some time
            self._again_at_s = time.monotonic() + RETRY_S
            self.copies.borrow(SWEEP_SHARE * self.max_bytes)
            return
        self.folder.events[Event.EVICTED] += swept.evicted
        self.folder.events[Event.ABANDONED] += swept.abandoned
        self.held_bytes = swept.held_bytes
        self.copies.swept(before, self.max_bytes - swept.held_bytes)


def open_shared(
    root: Path, max_bytes: int, upper: UpperBlocks, *, fingerprint: bytes, block_size: int, block_bytes: int
) -> OpenShared:
    """Open the tier in this folder, which is created if it does not exist. Raises OSError."""
    writer = f"{uuid.uuid4().hex[:16]}-{os.getpid()}"
    folder = SharedFolder(root, fingerprint=fingerprint, block_size=block_size, block_bytes=block_bytes, writer=writer)
    folder.open()
    slots = min(KNOWN_BLOCKS, max_bytes // folder.file_bytes)
    shared = OpenShared(folder, SharedCopies(folder, upper, slots), max_bytes)
    shared.start()
    return shared
