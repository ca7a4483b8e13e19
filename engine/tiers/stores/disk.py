"""The disk tier: copies between host memory and a file of blocks, and the blocks found in the file at the start."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from engine.cache.prefix_cache import PrefixCache
from engine.cache.sequence import CachedSequence
from engine.contract.load import MAX_STEP_S, StepCost
from engine.tiers.copies.base import BlockRun, CopyError, Direction, Moved
from engine.tiers.stores.block_file import NO_DIGEST, BlockFile, Label, Shape, check_unused, open_file
from engine.tiers.stores.place import Declined

log = logging.getLogger(__name__)

SUFFIX = ".warmroute-kv"
_COST_FILE = "step-cost.json"
_TRIAL_BYTES = 8 * 2**20
_CLOSE_S = 1.0
"""Seconds that a reset may take to reach the file when the engine stops."""


class DiskCopies:
    """A `BlockMover` from blocks of host memory to slots of a file.

    A block of the tier's index need not be in the slot of the same number: after a restart the index gives new numbers
    to the blocks it finds.
    """

    def __init__(self, file: BlockFile, memory: memoryview) -> None:
        """`memory`: the host tier's blocks, one after the other. Reads every label of the file."""
        self.block_bytes = file.shape.block_bytes
        self.pool_blocks = len(memory) // self.block_bytes
        self.host_slots = file.shape.slots
        self._file = file
        self._memory = memory
        self._slots = list(range(self.host_slots))
        """By block: its slot."""
        self._labels: list[Label | None] = [None] * self.host_slots
        """By block: what it holds, or will hold once its copy has ended."""
        self._found = dict(file.labels())
        """Slot -> label found there at the start, until it is indexed."""
        self._writing = threading.Lock()
        """Held while a block is written or the file is emptied."""
        self._resets = self._emptied = 0
        """Number of resets, and how many of them have reached the file."""
        self._emptying: threading.Thread | None = None

    def describe(self, block: int, label: Label) -> None:
        """Note what the block will hold. Call this before asking for its copy."""
        self._labels[block] = label

    def reset(self) -> None:
        """Forget all blocks. The file is emptied on another thread, so that no later engine finds them in it."""
        self._labels[:] = [None] * self.host_slots
        self._resets += 1
        if self._emptying is None or not self._emptying.is_alive():  # one that waits for a hanging disk is enough
            self._emptying = threading.Thread(target=self.finish_resets, name="disk-tier-reset", daemon=True)
            self._emptying.start()

    def finish_resets(self, wait_s: float = -1) -> None:
        """Empty the file if a reset asks for it. `wait_s`: seconds to wait for a block that is being written; negative:
        any time."""
        if self._emptied == self._resets:
            return
        if not self._writing.acquire(timeout=wait_s):
            log.error("disk tier: the file cannot be emptied as a reset has asked: it does not answer")
            return
        try:
            self._empty()
        except OSError as error:
            log.error("disk tier: the file cannot be emptied as a reset has asked: %s", error)
        finally:
            self._writing.release()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _empty(self) -> None:
        """Empty the file if a reset has not reached it yet."""
        while self._emptied < (resets := self._resets):
            self._file.clear()
            self._emptied = resets

    def move(self, run: BlockRun) -> Moved:
        """See `BlockMover.move`."""
        start_s = time.perf_counter()
        try:
            for pair in run.pairs:
                if run.direction is Direction.DEMOTE:
                    self._write(pair.target, self._kv(pair.source))
                else:
                    self._read(pair.source, self._kv(pair.target))
        except OSError as error:
            raise CopyError(f"{type(error).__name__}: {error}") from error
        return Moved(run.blocks, time.perf_counter() - start_s)

    def restore(self, index: PrefixCache) -> int:
        """Index what the file holds, parents first; return the number of blocks. Call this before the first copy.

        Blocks whose chain has a gap are left out, because nothing could reuse them.
        """
        found, self._found = self._found, {}
        slot_of = {label.digest: slot for slot, label in sorted(found.items(), key=lambda item: item[1].turn)}
        parents = {label.parent for label in found.values()}
        ends = [slot for digest, slot in slot_of.items() if digest not in parents]
        block_of = dict(enumerate(range(self.host_slots)))
        for end in sorted(ends, key=lambda slot: found[slot].turn):
            chain = _chain(end, found, slot_of)
            if chain:
                self._index(index, [found[slot] for slot in chain], chain, block_of)
        return index.indexed_blocks

    def _index(self, index: PrefixCache, labels: list[Label], slots: list[int], block_of: dict[int, int]) -> None:
        """Index one chain. `block_of`: by slot, its block; the inverse of `_slots`."""
        anchors = tuple((i, key) for i, label in enumerate(labels) for key in label.keys)
        digests, contents = [label.digest for label in labels], [label.content for label in labels]
        sequence = CachedSequence(index.block_size, b"", anchors, digests, contents)
        present = index.hold(sequence, len(labels))
        if present is None:
            return
        for i in range(present, len(labels)):
            block, slot = sequence.blocks[i], slots[i]
            other, displaced = block_of[slot], self._slots[block]
            self._slots[block], self._slots[other] = slot, displaced
            block_of[slot], block_of[displaced] = block, other
            self._labels[block] = labels[i]
        index.commit(sequence, len(labels) * index.block_size)
        index.release(sequence)

    @property
    def blocks(self) -> int:
        """See `UpperBlocks.blocks`."""
        return self.host_slots

    def read(self, block: int, kv: memoryview) -> memoryview:
        """See `UpperBlocks.read`."""
        self._read(block, kv)
        return kv

    def write(self, block: int, fill: Callable[[memoryview], None], kv: memoryview) -> None:
        """See `UpperBlocks.write`."""
        fill(kv)
        self._write(block, kv)

    def _kv(self, block: int) -> memoryview:
        return self._memory[block * self.block_bytes : (block + 1) * self.block_bytes]

    def _write(self, block: int, kv: memoryview) -> None:
        with self._writing:
            self._empty()
            label = self._labels[block]
            if label is None:
                raise Declined("the cache was reset meanwhile")
            if not label.fits:
                raise Declined("the block's label does not fit its slot")
            self._file.write(self._slots[block], label, kv)

    def _read(self, block: int, kv: memoryview) -> None:
        label = self._labels[block]
        if label is None:
            raise Declined("nothing is known about the block")
        self._file.read(self._slots[block], label.digest, kv)


@dataclass(frozen=True, slots=True)
class OpenDisk:
    """A disk tier's file, locked while it is open."""

    folder: Path
    copies: DiskCopies
    discarded_files: int
    """Number of removed files: those of other models, versions and sizes, and damaged ones."""

    def close(self) -> None:
        """Close the file, and give up its lock. Blocks for `_CLOSE_S` at most. A copy that still hangs then fails."""
        self.copies.finish_resets(_CLOSE_S)
        self.copies.close()

    def read_cost(self) -> StepCost:
        """Return the cost of computing that this folder's last engine stored; all zero if it left nothing valid."""
        try:
            fields = json.loads((self.folder / _COST_FILE).read_bytes())
            cost = StepCost(**{name: float(fields[name]) for name in StepCost.__slots__})
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return StepCost()
        return cost if all(0 <= seconds <= MAX_STEP_S for seconds in astuple(cost)) else StepCost()

    def write_cost(self, cost: StepCost) -> None:
        """Store what computing costs. Without it the next engine could not tell at first what is worth fetching."""
        path = self.folder / _COST_FILE
        try:
            path.with_suffix(".new").write_text(json.dumps(asdict(cost)))
            path.with_suffix(".new").replace(path)
        except OSError as error:
            log.warning("disk tier: %s cannot be written: %s", path, error)


def open_disk(folder: Path, shape: Shape, memory: memoryview) -> OpenDisk:
    """Open the tier in this folder, which is created if it does not exist.

    Removes what engines of other models or versions have left, so that the folder stays within its limit. Raises
    OSError; BlockingIOError if another engine uses the folder.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{shape.fingerprint[:8].hex()}{SUFFIX}"
    others = [other for other in folder.glob(f"*{SUFFIX}") if other != path]
    for other in others:
        check_unused(other)
    file, _, is_foreign = open_file(path, shape)
    for other in others:
        log.warning("disk tier: removing %s, which another model or version has left", other)
        other.unlink(missing_ok=True)
    return OpenDisk(folder, DiskCopies(file, memory), len(others) + is_foreign)


def trial(folder: Path, block_bytes: int) -> dict[Direction, tuple[int, float]]:
    """Write a file and read it back, bypassing the page cache; return bytes and seconds of both. Raises OSError."""
    path = folder / f"trial-{uuid.uuid4().hex}"
    data = os.urandom(max(1, _TRIAL_BYTES // block_bytes) * block_bytes if block_bytes < _TRIAL_BYTES else block_bytes)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        path.unlink()
        start_s = time.perf_counter()
        done = 0
        while done < len(data):
            done += os.pwrite(descriptor, data[done:], done)
        os.fdatasync(descriptor)
        written_s = time.perf_counter()
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        read = 0
        while read < len(data) and (count := len(os.pread(descriptor, len(data) - read, read))):
            read += count
        end_s = time.perf_counter()
    finally:
        os.close(descriptor)
    return {Direction.DEMOTE: (len(data), written_s - start_s), Direction.PROMOTE: (len(data), end_s - written_s)}


def _chain(end: int, found: dict[int, Label], slot_of: dict[bytes, int]) -> list[int]:
    """Return the slots from a chain's first block to `end`; empty if a block in between is missing."""
    chain = [end]
    seen = {end}
    while (parent := found[chain[-1]].parent) != NO_DIGEST:
        slot = slot_of.get(parent)
        if slot is None or slot in seen:
            return []
        seen.add(slot)
        chain.append(slot)
    chain.reverse()
    return chain
