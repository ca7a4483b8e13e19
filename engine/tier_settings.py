"""The tiers below the KV pool that the settings ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.backend.profile_file import load_profile
from engine.cache.eviction import Eviction
from engine.cache.prefix_cache import PrefixCache
from engine.config import EngineSettings
from engine.contract.events import Tier
from engine.tiers.build import Store, TierError, disk_store, emulated_store, host_store, make_tiers
from engine.tiers.fingerprint import model_fingerprint
from engine.tiers.tiers import Tiers

if TYPE_CHECKING:
    from engine.backend.torch_kv import KvPool


def real_stores(settings: EngineSettings, pool: KvPool) -> tuple[Store, ...]:
    """Of a device that computes. Blocks. Raises TierError."""
    if not settings.host_cache_bytes:
        return ()
    host = host_store(pool, settings.host_cache_bytes)
    if not settings.disk_cache_bytes or settings.disk_cache_path is None:
        return (host,)
    try:
        return host, _disk(settings, settings.disk_cache_path, pool, host)
    except TierError:
        host.close()
        raise


def _disk(settings: EngineSettings, folder: Path, pool: KvPool, host: Store) -> Store:
    layout = (settings.device_kind, pool.data.dtype, *pool.data.shape[1:])
    try:
        fingerprint = model_fingerprint(settings.model, layout)
    except OSError as error:
        raise TierError(f"--model {settings.model} cannot be read: {error.strerror or error}") from None
    return disk_store(host, folder, settings.disk_cache_bytes, block_size=settings.block_size, fingerprint=fingerprint)


def emulated_stores(settings: EngineSettings, blocks: int) -> tuple[Store, ...]:
    """Of device sim, whose copies go by the event loop's clock; `blocks`: of the pool. Raises TierError."""
    if settings.device != "sim" or not settings.host_cache_bytes:
        return ()
    profile = load_profile(settings.sim_profile)
    stores: list[Store] = []
    for tier, tier_bytes, gb_s in (
        (Tier.HOST, settings.host_cache_bytes, profile.host_gb_s),
        (Tier.DISK, settings.disk_cache_bytes, profile.disk_gb_s),
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
    settings: EngineSettings, cache: PrefixCache, stores: Sequence[Store], wake: Callable[[], None]
) -> Tiers:
    """The tiers over these stores; `wake`: called, on any thread, when a copy has ended."""
    return make_tiers(
        cache,
        stores,
        eviction=Eviction(settings.eviction),
        step_tokens=settings.max_step_tokens,
        clock=asyncio.get_running_loop().time,
        on_end=wake,
    )
