"""Opens the stores below the host tier: on disk, in a shared folder, and emulated ones."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from engine.tiers.copies.base import Direction
from engine.tiers.copies.copier import BlockCopier, CopyLimits
from engine.tiers.stores.block_file import HEAD_BYTES, LABEL_BYTES, Shape
from engine.tiers.stores.disk import open_disk, trial
from engine.tiers.stores.emulated import EmulatedCopies, Timers
from engine.tiers.stores.place import Place
from engine.tiers.stores.shared import HostBlocks, open_shared
from engine.tiers.stores.shared_folder import HEAD_BYTES as SHARED_HEAD_BYTES
from engine.tiers.stores.store import LIMITS, Store, TierError, slots_of
from engine.tiers.stores.threads import ThreadedCopies

log = logging.getLogger(__name__)


def disk_store(host: Store, folder: Path, disk_bytes: int, *, block_size: int, fingerprint: bytes) -> Store:
    """Build the disk tier below the host tier, with what an earlier engine has left there. Blocks while it writes and
    reads some megabytes. Raises TierError."""
    assert host.memory is not None
    slots = (disk_bytes - HEAD_BYTES) // (LABEL_BYTES + host.block_bytes)
    if slots < 1:
        raise TierError(
            f"--disk-cache-bytes {disk_bytes} holds no block: one block takes {LABEL_BYTES + host.block_bytes} bytes, "
            f"and the head of the file {HEAD_BYTES}"
        )
    where = f"--disk-cache-path {folder}"
    try:
        disk = open_disk(folder, Shape(slots, host.block_bytes, block_size, fingerprint), host.memory)
    except BlockingIOError:
        raise TierError(f"{where} is in use by another engine: give each a folder of its own") from None
    except OSError as error:
        raise TierError(f"{where} cannot be used: {error.strerror or error}") from None
    telling = ThreadedCopies(disk.copies, "disk-tier")
    copier = BlockCopier(telling, time.monotonic, LIMITS)
    try:
        for direction, (moved_bytes, elapsed_s) in trial(folder, host.block_bytes).items():
            copier.learn_rate(direction, moved_bytes, elapsed_s)
    except OSError as error:
        log.warning("disk tier: its speed is not known until blocks are written: %s", error)
    return Store(Place.DISK, slots, host.block_bytes, copier, telling, disk=disk, beside=host.beside)


def shared_store(
    above: Store, host: Store, root: Path, shared_bytes: int, *, block_size: int, fingerprint: bytes
) -> Store:
    """Build the shared tier below `above`, which is the host tier or the disk tier. Blocks while it writes and reads
    some megabytes. Raises TierError."""
    assert host.memory is not None
    size = SHARED_HEAD_BYTES + host.block_bytes
    if shared_bytes < size:
        raise TierError(f"--shared-cache-bytes {shared_bytes} holds no block: one block takes {size} bytes")
    upper = above.disk.copies if above.disk is not None else HostBlocks(host.memory, host.block_bytes)
    try:
        shared = open_shared(
            root,
            shared_bytes,
            upper,
            fingerprint=fingerprint,
            block_size=block_size,
            block_bytes=host.block_bytes,
        )
    except OSError as error:
        raise TierError(f"--shared-cache-path {root} cannot be used: {error.strerror or error}") from None
    telling = ThreadedCopies(shared.copies, "shared-tier")
    copier = BlockCopier(telling, time.monotonic, LIMITS)
    try:
        for direction, (moved_bytes, elapsed_s) in trial(shared.folder.path, host.block_bytes).items():
            copier.learn_rate(direction, moved_bytes, elapsed_s)
    except OSError as error:
        log.warning("shared tier: its speed is not known until blocks are written: %s", error)
    return Store(
        Place.SHARED, shared.copies.host_slots, host.block_bytes, copier, telling, shared=shared, beside=host.beside
    )


def emulated_store(
    timers: Timers,
    tier: Place,
    tier_bytes: int,
    *,
    pool_blocks: int,
    block_bytes: int,
    bytes_per_s: float,
    limits: CopyLimits | None = LIMITS,
) -> Store:
    """Build an emulated tier. `pool_blocks`: blocks of the tier above it; `limits`: of its copies, None: those of a
    card. Raises TierError."""
    slots = slots_of(f"--{tier.name.lower()}-cache-bytes", tier_bytes, block_bytes)
    copies = EmulatedCopies(
        timers, pool_blocks=pool_blocks, host_slots=slots, block_bytes=block_bytes, bytes_per_s=bytes_per_s
    )
    copier = BlockCopier(copies, timers.time, limits)
    for direction in Direction:
        copier.learn_rate(direction, int(bytes_per_s), 1.0)
    return Store(tier, slots, block_bytes, copier, copies)
