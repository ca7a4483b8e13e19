"""The host tier of a pool on a card: its store, with measured copies."""

from __future__ import annotations

import time

from engine.backend.cuda.copies import CudaCopyEngine, PageLockedPool
from engine.backend.host_tier import bytes_of, host_pool, measure
from engine.backend.torch_kv import KvPool
from engine.tiers.copies.copier import BlockCopier
from engine.tiers.stores.place import Place
from engine.tiers.stores.store import Store


def cuda_host_store(kv: KvPool, host_bytes: int) -> Store:
    """Build the host tier of `host_bytes` bytes below the pool. Blocks while it measures copies. Raises TierError."""
    host = host_pool(PageLockedPool, kv, host_bytes)
    copier = BlockCopier(CudaCopyEngine(kv.data, host), time.monotonic)
    measure(kv, host, copier)
    return Store(Place.HOST, len(host.data), host.slot_bytes, copier, memory=bytes_of(host))
