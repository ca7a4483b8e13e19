"""`exact`: blocks that come back from a tier have the same bits as blocks computed again, on every architecture.

Without `exact`, greedy tokens differ only if the two best logits are nearer than the bound.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine.backend.host_tier import cpu_host_store
from engine.backend.torch_backend import TorchBackend
from engine.cache.eviction import Eviction
from engine.cache.index import IndexKind
from engine.cache.prefix_cache import PrefixCache
from engine.contract.load import StepCost
from engine.tiers.build import close_stores, make_tiers
from engine.tiers.stores.opening import disk_store, shared_store
from engine.tiers.stores.place import Place
from engine.tiers.stores.store import Store
from engine.tiers.tiers import Tiers
from tests.engine.backend.exact_serving import BLOCK_SIZE, empty, serve
from tests.engine.backend.test_exact import beside, loaded, near_and_far, request, with_near_logits
from tests.engine.model.helpers import tokens
from tests.engine.model.test_transformers_oracle import CASES

BLOCKS = 80
DEADLINE_S = 60.0
FINGERPRINT = b"f" * 32
PROMPT = tokens(22, seed=1)
IN_BLOCKS = 20
"""The prompt's tokens that are in whole blocks. Tiers hold only whole blocks."""


class Copies:
    """Waits for the copies that threads make."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def end(self) -> None:
        self._ended.set()

    def wait(self) -> None:
        """Wait until one copy has ended."""
        assert self._ended.wait(DEADLINE_S), "no copy has ended"
        self._ended.clear()

    def settle(self, tiers: Tiers) -> None:
        """Wait until all copies have ended."""
        tiers.begin_step(0.0)  # no request is computed
        tiers.poll()
        while tiers.is_busy:
            self.wait()
            tiers.poll()


def stores_below(backend: TorchBackend, folder: Path) -> Sequence[Store]:
    """Return every kind of tier, from the pool downwards."""
    host = cpu_host_store(backend.pool, 2**20)
    disk = disk_store(host, folder / "disk", 2**20, block_size=BLOCK_SIZE, fingerprint=FINGERPRINT)
    shared = shared_store(disk, host, folder / "shared", 2**20, block_size=BLOCK_SIZE, fingerprint=FINGERPRINT)
    return host, disk, shared


def spoil(backend: TorchBackend, stores: Sequence[Store]) -> None:
    """Overwrite the pool, and the host tier if it is among `stores`, so that every reader gets other bits."""
    backend.pool.data.fill_(torch.nan)
    for store in stores:
        if store.memory is not None:
            store.memory[:] = b"\xff" * len(store.memory)


def lose_down_to(depth: int, tiers: Tiers, cache: PrefixCache, backend: TorchBackend, stores: Sequence[Store]) -> None:
    """Lose what the pool and the first `depth` tiers hold."""
    cache.reset()
    for link in tiers._links[:depth]:
        link.lower.reset()
    spoil(backend, stores[:depth])


@pytest.mark.parametrize("case", CASES)
def test_warm_from_any_tier_is_cold(case: str, tmp_path: Path) -> None:
    kind, config = CASES[case]
    model = loaded(kind, tmp_path / "model", **config)
    backend = TorchBackend(model, block_count=BLOCKS, block_size=BLOCK_SIZE, exact=True)
    (cold,) = serve(backend, empty(backend), [request(1, PROMPT)], 64)
    stores = stores_below(backend, tmp_path / "kv")
    copies, cache = Copies(), empty(backend, IndexKind.RADIX)
    tiers = make_tiers(cache, stores, eviction=Eviction.LRU, step_tokens=64, clock=time.monotonic, on_end=copies.end)
    tiers.learn_cost(StepCost(token_s=100.0))  # computing is so slow that a fetch is always faster
    try:
        serve(backend, cache, [request(2, PROMPT)], 64, tiers=tiers, wait=copies.wait)
        copies.settle(tiers)
        for depth, tier in enumerate(Place):
            lose_down_to(depth, tiers, cache, backend, stores)
            others = beside(depth)
            answers = serve(backend, cache, [request(1, PROMPT), *others], 23, tiers=tiers, wait=copies.wait)
            assert answers[0].cached_tokens == IN_BLOCKS
            hit = sum(answer.cached_tokens for answer in answers)
            assert tiers.stats.hit_tokens[tier] == hit, "not only this tier was read"
            assert torch.equal(answers[0].bits(), cold.bits()), tier
            copies.settle(tiers)
    finally:
        close_stores(stores, tiers)


def test_if_exact_is_off_greedy_tokens_differ_only_at_near_logits(tmp_path: Path) -> None:
    """Warm prompts are read from host memory, disk and shared folder. Unlike cold ones, they
    run beside other requests."""
    backend = with_near_logits(tmp_path / "model")
    prompts = [tokens(22, seed=seed) for seed in range(6)]
    cold = [serve(backend, empty(backend), [request(1, prompt)], 64)[0] for prompt in prompts]
    stores = stores_below(backend, tmp_path / "kv")
    copies, cache = Copies(), empty(backend)
    tiers = make_tiers(cache, stores, eviction=Eviction.LRU, step_tokens=64, clock=time.monotonic, on_end=copies.end)
    tiers.learn_cost(StepCost(token_s=100.0))
    seen = []
    try:
        for prompt, alone in zip(prompts, cold, strict=True):
            serve(backend, cache, [request(2, prompt)], 64, tiers=tiers, wait=copies.wait)
            copies.settle(tiers)
            for depth, tier in enumerate(Place):
                lose_down_to(depth, tiers, cache, backend, stores)
                before = tiers.stats.hit_tokens[tier]
                warm, *_ = serve(backend, cache, [request(1, prompt), *beside(2)], 23, tiers=tiers, wait=copies.wait)
                assert warm.cached_tokens == IN_BLOCKS
                assert tiers.stats.hit_tokens[tier] >= before + IN_BLOCKS, "this tier was not read"
                seen.append(near_and_far(warm, alone))
                copies.settle(tiers)
    finally:
        close_stores(stores, tiers)
    near, far = map(sum, zip(*seen, strict=True))
    assert near, "no gap is under the bound, so the bound is not tested"
    assert far
