"""Tiers below the pool of an emulated pod: the engine's own tiers, with copies that take a profile's time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.backend.profiles import SimProfile
from engine.cache.eviction import Eviction
from engine.cache.prefix_cache import PrefixCache
from engine.tiers.build import make_tiers
from engine.tiers.stores.emulated_shared import EmulatedFolder, emulated_shared_store
from engine.tiers.stores.opening import emulated_store
from engine.tiers.stores.place import Place
from engine.tiers.stores.store import Store
from engine.tiers.tiers import Tiers
from loadgen.simulate.pods.timeline import Action, Timeline

LOOKUP_S = 0.001
"""Delay until it is known how much of a prompt a shared folder holds."""


@dataclass(frozen=True, slots=True)
class TierSpec:
    """The tiers below a pod's pool. Rates are in GB/s, per pod and direction."""

    host_tokens: int
    """Tokens whose KV the host memory holds."""
    host_gb_s: float
    shared_gb_s: float = 0.0
    """0: no shared tier. Otherwise the fleet has a folder (`FleetSpec.shared_tokens`)."""


@dataclass(frozen=True, slots=True)
class VirtualTimers:
    """Presents a timeline as `engine.tiers.stores.emulated.Timers`."""

    timeline: Timeline

    def time(self) -> float:
        """Return seconds that never go back."""
        return self.timeline.now_s

    def call_at(self, when: float, callback: Callable[[], object], /) -> object:
        """Call `callback` at the time `when`."""
        action: Action = lambda: (callback(), None)[1]  # noqa: E731
        self.timeline.at(when, action)
        return None


def pod_tiers(
    spec: TierSpec,
    pool: PrefixCache,
    profile: SimProfile,
    timeline: Timeline,
    folder: EmulatedFolder | None,
    *,
    step_tokens: int,
    on_end: Callable[[], None],
) -> Tiers:
    """Return the tiers of a pod. Raises ValueError if it needs a shared tier and the fleet has no folder."""
    timers = VirtualTimers(timeline)
    block_bytes = profile.kv_token_bytes * pool.block_size
    stores: list[Store] = [
        emulated_store(
            timers,
            Place.HOST,
            spec.host_tokens * profile.kv_token_bytes,
            pool_blocks=pool.pool.total,
            block_bytes=block_bytes,
            bytes_per_s=spec.host_gb_s * 1e9,
            limits=None,
        )
    ]
    if spec.shared_gb_s:
        if folder is None:
            raise ValueError("pods with a shared tier need a fleet with shared_tokens")
        stores.append(
            emulated_shared_store(
                folder,
                pool_blocks=stores[0].blocks,
                block_bytes=block_bytes,
                bytes_per_s=spec.shared_gb_s * 1e9,
                lookup_s=LOOKUP_S,
            )
        )
    return make_tiers(pool, stores, eviction=Eviction.LRU, step_tokens=step_tokens, clock=timeline.clock, on_end=on_end)
