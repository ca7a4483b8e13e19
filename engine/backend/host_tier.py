"""The host tier of a pool in host memory: its store, with measured copies."""

from __future__ import annotations

import time
from typing import TypeVar

from engine.backend.host_memory import CpuBlockMover, HostMemoryError, HostPool
from engine.backend.torch_kv import KvPool
from engine.tiers.copies.base import CopyError
from engine.tiers.copies.copier import BlockCopier
from engine.tiers.stores.measure import measure_rates
from engine.tiers.stores.place import Place
from engine.tiers.stores.store import LIMITS, Store, TierError, slots_of
from engine.tiers.stores.threads import ThreadedCopies

MEASURED_BYTES = 32 << 20
"""Bytes that are copied in both directions at the start to learn the rates."""
BESIDE_CPU_STEPS = 0.25
"""`beside` of a `Link` on the CPU, where steps and copies share the memory (`tests.bench.engine.bench_tier_steps`).
Steps on a card are not delayed."""
MEASURE_S = 30.0
"""Seconds within which the measurement at the start must end."""

P = TypeVar("P", bound=HostPool)


def cpu_host_store(kv: KvPool, host_bytes: int) -> Store:
    """Build the host tier of `host_bytes` bytes below the pool. Blocks while it measures copies. Raises TierError."""
    host = host_pool(HostPool, kv, host_bytes)
    copies = ThreadedCopies(CpuBlockMover(kv.data, host), "host-tier")
    copier = BlockCopier(copies, time.monotonic, LIMITS)
    measure(kv, host, copier)
    return Store(Place.HOST, len(host.data), host.slot_bytes, copier, copies, bytes_of(host), beside=BESIDE_CPU_STEPS)


def host_pool(kind: type[P], kv: KvPool, host_bytes: int) -> P:
    """Return memory of this kind for as many blocks as fit in `host_bytes`. Raises TierError."""
    slots = slots_of("--host-cache-bytes", host_bytes, kv.data[0].nbytes)
    try:
        return kind(kv.data, slots)
    except HostMemoryError as error:
        raise TierError(f"--host-cache-bytes {host_bytes}: {error}") from None


def measure(kv: KvPool, host: HostPool, copier: BlockCopier) -> None:
    """Learn how fast the copies are, with blocks of zeros. Blocks the thread. Raises TierError."""
    blocks = max(1, min(MEASURED_BYTES // host.slot_bytes, len(host.data), len(kv.data)))
    kv.data[:blocks].zero_()
    try:
        measure_rates(copier, blocks, MEASURE_S)
    except (CopyError, TimeoutError) as error:
        raise TierError(f"--host-cache-bytes {host.data.nbytes}: blocks cannot be copied: {error}") from None


def bytes_of(host: HostPool) -> memoryview:
    """Return all slots, one after the other."""
    return host.data.numpy().reshape(-1).data
