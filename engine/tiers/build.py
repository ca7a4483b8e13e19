"""Builds the tiers that the settings ask for."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engine.cache.eviction import Eviction
from engine.cache.prefix_cache import PrefixCache
from engine.tiers.allowance import STEP_SHARE
from engine.tiers.copies.base import CopyEngine, CopyError, Direction
from engine.tiers.copies.copier import BlockCopier, CopyLimits
from engine.tiers.link import Link
from engine.tiers.stores.block_file import HEAD_BYTES, LABEL_BYTES, Label, Shape
from engine.tiers.stores.disk import OpenDisk, open_disk, trial
from engine.tiers.stores.emulated import EmulatedCopies, Timers
from engine.tiers.stores.lookups import TellingLookups
from engine.tiers.stores.place import Place
from engine.tiers.stores.shared import HostBlocks, open_shared
from engine.tiers.stores.shared_folder import HEAD_BYTES as SHARED_HEAD_BYTES
from engine.tiers.stores.stats import SharedSize
from engine.tiers.stores.threads import ThreadedCopies
from engine.tiers.tiers import Tiers

if TYPE_CHECKING:
    from engine.backend.torch_kv import KvPool

log = logging.getLogger(__name__)

_MIB = 1 << 20
LIMITS = CopyLimits(job_bytes=4 * _MIB, in_flight_bytes=16 * _MIB, half_life_bytes=256 * _MIB)
"""Limits of copies on threads. After a copy is given up, the bytes in flight are still copied."""
CUDA_POLL_S = 0.001
"""Seconds between polls on a card, whose copies do not report that they have ended."""
MEASURED_BYTES = 32 * _MIB
"""Bytes that are copied in both directions at the start to learn the rates."""
BESIDE_CPU_STEPS = 0.25
"""`beside` of a `Link` on the CPU, where steps and copies share the memory (`tests.bench.engine.bench_tier_steps`).
Steps on a card are not delayed."""
MEASURE_S = 30.0
"""Seconds within which the measurement at the start must end."""


class TierError(Exception):
    """A tier cannot be built; the text names the setting and the remedy."""


class _Telling(CopyEngine, Protocol):
    """Copies that report their end."""

    def tell(self, on_end: Callable[[], None] | None) -> None: ...
    def close(self) -> None: ...


class SharedSide(Protocol):
    """A shared tier without its copies."""

    @property
    def lookups(self) -> TellingLookups: ...
    @property
    def describe(self) -> Callable[[int, Label], None]: ...
    def size(self) -> SharedSize: ...
    def reset(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Store:
    """A tier without its index: room for blocks, and measured copies between it and the tier above it."""

    tier: Place
    blocks: int
    block_bytes: int
    copier: BlockCopier
    telling: _Telling | None = None
    """The copies, if they report their end."""
    memory: memoryview | None = None
    """The host tier's blocks, one after the other, for a tier below that reads and writes them."""
    disk: OpenDisk | None = None
    """What the disk tier writes to; None for other tiers."""
    shared: SharedSide | None = None
    """The other parts of a tier to which other engines write, too; None for other tiers."""
    beside: float = 0.0
    """See `Link`."""

    def close(self) -> None:
        """Begin no further copy. Blocks the calling thread for at most a second."""
        if self.shared is not None:
            self.shared.close()
        if self.telling is not None:
            self.telling.close()
        if self.disk is not None:
            self.disk.close()


def host_store(kv: KvPool, host_bytes: int) -> Store:
    """Build the host tier of `host_bytes` bytes below the pool. Blocks while it measures copies. Raises TierError."""
    # Imported here: an emulated pod needs no torch.
    from engine.backend.cuda.copies import CpuBlockMover, CudaCopyEngine, HostMemoryError, HostPool, measure_rates

    pool = kv.data
    block_bytes = pool[0].nbytes
    slots = _slots("--host-cache-bytes", host_bytes, block_bytes)
    try:
        host = HostPool(pool, slots)
    except HostMemoryError as error:
        raise TierError(f"--host-cache-bytes {host_bytes}: {error}") from None
    telling = None if pool.device.type == "cuda" else ThreadedCopies(CpuBlockMover(pool, host), "host-tier")
    copier = BlockCopier(telling or CudaCopyEngine(pool, host), time.monotonic, LIMITS if telling else None)
    measured = max(1, min(MEASURED_BYTES // block_bytes, slots, len(pool)))
    pool[:measured].zero_()
    try:
        measure_rates(copier, measured, MEASURE_S)
    except (CopyError, TimeoutError) as error:
        raise TierError(f"--host-cache-bytes {host_bytes}: blocks cannot be copied: {error}") from None
    memory = host.data.numpy().reshape(-1).data
    return Store(Place.HOST, slots, block_bytes, copier, telling, memory, beside=BESIDE_CPU_STEPS if telling else 0.0)


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
    slots = _slots(f"--{tier.name.lower()}-cache-bytes", tier_bytes, block_bytes)
    copies = EmulatedCopies(
        timers, pool_blocks=pool_blocks, host_slots=slots, block_bytes=block_bytes, bytes_per_s=bytes_per_s
    )
    copier = BlockCopier(copies, timers.time, limits)
    for direction in Direction:
        copier.learn_rate(direction, int(bytes_per_s), 1.0)
    return Store(tier, slots, block_bytes, copier, copies)


def make_tiers(
    pool: PrefixCache,
    stores: Sequence[Store],
    *,
    eviction: Eviction,
    step_tokens: int,
    clock: Callable[[], float],
    on_end: Callable[[], None],
    step_share: float = STEP_SHARE,
    computed: Callable[[], float] | None = None,
    later: Callable[[], object] | None = None,
) -> Tiers:
    """Build the tiers over these stores, from the pool downwards. `on_end`: called on any thread when a copy has ended;
    `step_share`, `computed` and `later`: see `Tiers`."""
    links: list[Link] = []
    upper = pool
    for store in stores:
        lower = PrefixCache(store.blocks, pool.block_size, eviction=eviction)
        describe: Callable[[int, Label], None] | None = None
        forget: Callable[[], None] | None = None
        if store.disk is not None:
            found = store.disk.copies.restore(lower)
            log.info("disk tier: %d blocks of %d found again", found, store.blocks)
            describe, forget = store.disk.copies.describe, store.disk.copies.reset
        if store.shared is not None:
            describe = store.shared.describe
            store.shared.lookups.tell(on_end)
        links.append(Link(store.tier, upper, lower, store.copier, store.block_bytes, describe, store.beside, forget))
        if store.telling is not None:
            store.telling.tell(on_end)
        upper = lower
    poll_s = math.inf if all(store.telling for store in stores) else CUDA_POLL_S
    shared = stores[-1].shared if stores else None
    tiers = Tiers(
        pool,
        links,
        step_tokens=step_tokens,
        clock=clock,
        poll_s=poll_s,
        shared=shared,
        step_share=step_share,
        computed=computed,
        later=later,
    )
    for store in stores:
        if store.disk is not None:
            tiers.learn_cost(store.disk.read_cost())
            tiers.stats.discarded_files[store.tier] = store.disk.discarded_files
    return tiers


def close_stores(stores: Sequence[Store], tiers: Tiers) -> None:
    """Begin no further copy, and store what was learnt for the next engine. Blocks for some seconds at most."""
    for store in reversed(stores):
        if store.disk is not None and tiers.cost.token_s:
            store.disk.write_cost(tiers.cost)
        store.close()


def _slots(setting: str, tier_bytes: int, block_bytes: int) -> int:
    if tier_bytes < block_bytes:
        raise TierError(f"{setting} {tier_bytes} holds no block: one block takes {block_bytes} bytes")
    return tier_bytes // block_bytes
