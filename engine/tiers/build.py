"""Builds the tiers over the stores that the settings ask for."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from engine.cache.eviction import Eviction
from engine.cache.prefix_cache import PrefixCache
from engine.tiers.allowance import StepSharing
from engine.tiers.link import Link
from engine.tiers.stores.block_file import Label
from engine.tiers.stores.store import Store
from engine.tiers.tiers import Tiers

log = logging.getLogger(__name__)

CUDA_POLL_S = 0.001
"""Seconds between polls on a card, whose copies do not report that they have ended."""


def make_tiers(
    pool: PrefixCache,
    stores: Sequence[Store],
    *,
    eviction: Eviction,
    step_tokens: int,
    clock: Callable[[], float],
    on_end: Callable[[], None],
    sharing: StepSharing | None = None,
) -> Tiers:
    """Build the tiers over these stores, from the pool downwards. `on_end`: called on any thread when a copy has
    ended; `sharing`: see `Tiers`."""
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
        sharing=sharing,
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
