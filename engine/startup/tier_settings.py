"""The tiers below the KV pool that the settings ask for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from engine.backend.profile_file import load_profile
from engine.cache.eviction import Eviction
from engine.cache.prefix_cache import PrefixCache
from engine.startup.settings import EngineSettings
from engine.tiers.allowance import HIDDEN_SHARE, STEP_SHARE, StepSharing
from engine.tiers.build import make_tiers
from engine.tiers.stores.fingerprint import model_fingerprint
from engine.tiers.stores.opening import disk_store, emulated_store, shared_store
from engine.tiers.stores.place import Place
from engine.tiers.stores.store import Store, TierError
from engine.tiers.tiers import Tiers

if TYPE_CHECKING:
    from engine.backend.torch_kv import KvPool


def real_stores(settings: EngineSettings, pool: KvPool) -> tuple[Store, ...]:
    """Return the tiers of a device that computes. Blocks. Raises TierError."""
    if not settings.host_cache_bytes:
        return ()
    host = _host_store(pool, settings.host_cache_bytes)
    stores = [host]
    disk, shared, size = settings.disk_cache_path, settings.shared_cache_path, settings.block_size
    if disk is None and shared is None:
        return (host,)
    try:
        fingerprint = _fingerprint(settings, pool)
        if disk is not None and (disk_bytes := settings.disk_cache_bytes):
            stores.append(disk_store(host, disk, disk_bytes, block_size=size, fingerprint=fingerprint))
        if shared is not None and (shared_bytes := settings.shared_cache_bytes):
            above = stores[-1]
            stores.append(shared_store(above, host, shared, shared_bytes, block_size=size, fingerprint=fingerprint))
    except TierError:
        for store in reversed(stores):
            store.close()
        raise
    return tuple(stores)


def _host_store(pool: KvPool, host_bytes: int) -> Store:
    """Raises TierError."""
    # Imported here: an emulated pod needs no torch, and a pod on the CPU nothing of CUDA.
    if pool.data.device.type == "cuda":
        from engine.backend.cuda.host_tier import cuda_host_store

        return cuda_host_store(pool, host_bytes)
    from engine.backend.host_tier import cpu_host_store

    return cpu_host_store(pool, host_bytes)


def _fingerprint(settings: EngineSettings, pool: KvPool) -> bytes:
    """Raises TierError."""
    layout = (settings.device_kind, pool.data.dtype, *pool.data.shape[1:])
    if settings.device_kind == "cpu" and settings.exact:
        # A block computed in another way has other bits, even if only the CPU's instructions differ.
        from engine.backend.arithmetic import cpu_arithmetic  # an emulated pod needs no torch

        layout += ("exact", settings.threads, *cpu_arithmetic())
    try:
        return model_fingerprint(settings.model, layout)
    except OSError as error:
        raise TierError(f"--model {settings.model} cannot be read: {error.strerror or error}") from None


def emulated_stores(settings: EngineSettings, blocks: int) -> tuple[Store, ...]:
    """Return the tiers of device sim, whose copies take time on the event loop's clock; `blocks`: the pool's.

    Raises TierError.
    """
    if settings.device != "sim" or not settings.host_cache_bytes:
        return ()
    profile = load_profile(settings.sim_profile)
    stores: list[Store] = []
    for tier, tier_bytes, gb_s in (
        (Place.HOST, settings.host_cache_bytes, profile.host_gb_s),
        (Place.DISK, settings.disk_cache_bytes, profile.disk_gb_s),
    ):
        if tier_bytes:
            stores.append(
                emulated_store(
                    asyncio.get_running_loop(),
                    tier,
                    tier_bytes,
                    pool_blocks=stores[-1].blocks if stores else blocks,
                    block_bytes=profile.kv_token_bytes * settings.block_size,
                    bytes_per_s=gb_s * 1e9,
                )
            )
    return tuple(stores)


def tiers_over(
    settings: EngineSettings,
    cache: PrefixCache,
    stores: Sequence[Store],
    wake: Callable[[], None],
    *,
    eviction: Eviction,
    plans_ahead: bool,
) -> Tiers:
    """Return the tiers over these stores.

    `wake` makes the event loop look after the copies. The tiers call it, on any thread, when copies end or may begin.
    `plans_ahead`: a step is planned during the step before it.
    """
    return make_tiers(
        cache,
        stores,
        eviction=eviction,
        step_tokens=settings.max_step_tokens,
        clock=asyncio.get_running_loop().time,
        on_end=wake,
        sharing=StepSharing(
            HIDDEN_SHARE if plans_ahead else STEP_SHARE,
            computed=None if settings.device == "sim" else time.thread_time,
            later=wake,
        ),
    )
