"""Prompts that repeat in a fixed order and need more than the pool: a part of them stays until the traffic changes."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, run_state_machine_as_test

from engine.cache import loops
from engine.cache.eviction import Eviction, GreedyDual
from engine.cache.index import IndexKind
from engine.cache.loops import Loops
from engine.cache.prefix_cache import PrefixCache
from tests.engine.cache.integrity import check_integrity
from tests.engine.cache.test_prefix_cache_stateful import SETTINGS, CacheMachine

POOL, SIZE = 1200, 4
INDEXES = [IndexKind.HASH, IndexKind.RADIX]


def prompts_of(pools: float, seed: int = 1) -> list[list[int]]:
    """Return different prompts of 10 to 60 blocks. Together they have `pools` times the blocks of the pool."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    left = pools * POOL
    while left > 0:
        blocks = min(rng.randint(10, 60), int(left) + 1)
        prompts.append([rng.randrange(100_000) for _ in range(blocks * SIZE)])
        left -= blocks
    return prompts


def play(cache: PrefixCache, prompts: list[list[int]]) -> float:
    """Serve the prompts in turn; return the part of their tokens that was reused."""
    hits = asked = 0
    for tokens in prompts:
        sequence = cache.open(tokens)
        cached = cache.admit(sequence, len(tokens))
        assert cached is not None
        cache.commit(sequence, len(tokens))
        cache.release(sequence)
        hits += cached
        asked += len(tokens)
    return hits / asked


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("eviction", [Eviction.LFU, Eviction.COST])
@pytest.mark.parametrize("pools", [1.2, 1.5, 3.0])
def test_a_part_of_a_loop_longer_than_the_pool_is_hit(index: IndexKind, eviction: Eviction, pools: float) -> None:
    cache = PrefixCache(POOL, SIZE, index=index, eviction=eviction)
    prompts = prompts_of(pools)
    play(cache, prompts * 3)
    assert play(cache, prompts * 3) > 0.6 / pools, "most of what the pool can hold is hit"
    check_integrity(cache)


def test_lru_hits_nothing_of_a_loop() -> None:
    """LRU is left as it is in vLLM and SGLang, because it represents them in comparisons."""
    cache = PrefixCache(POOL, SIZE, eviction=Eviction.LRU)
    prompts = prompts_of(1.5)
    play(cache, prompts * 3)
    assert play(cache, prompts) == 0.0


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("eviction", [Eviction.LFU, Eviction.COST])
def test_what_was_spared_goes_when_the_loop_is_over(index: IndexKind, eviction: Eviction) -> None:
    cache = PrefixCache(POOL, SIZE, index=index, eviction=eviction)
    loop, other = prompts_of(1.5), prompts_of(0.7, seed=2)
    play(cache, loop * 5)
    assert isinstance(cache.pool.order, GreedyDual)
    assert cache.pool.order.spared > POOL / 2
    for seed in range(3, 9):
        play(cache, prompts_of(0.5, seed=seed))  # prompts that occur once
    play(cache, other)
    play(cache, other)
    assert play(cache, other) > 0.9
    check_integrity(cache)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), pools=st.floats(0.1, 0.9), common=st.integers(0, 40))
def test_nothing_is_spared_if_the_eviction_order_keeps_something(seed: int, pools: float, common: int) -> None:
    """Prompts that fit the pool, occur once, or only share their beginnings are not a loop."""
    rng = random.Random(seed)
    beginning = [rng.randrange(100_000) for _ in range(common * SIZE)]
    cache = PrefixCache(300, SIZE, eviction=Eviction.LFU)
    assert isinstance(cache.pool.order, GreedyDual)
    fitting = [rng.randrange(100_000) for _ in range(int(pools * 200) * SIZE)]
    for _ in range(20):
        for tokens in (fitting, [*beginning, *[rng.randrange(100_000) for _ in range(80 * SIZE)]]):
            play(cache, [tokens])
            assert cache.pool.order.spared == 0


def test_counts_say_whether_it_is_a_loop() -> None:
    assert not Loops(100).admitted(100, 100), "the blocks of one pool are too few to tell"
    found = Loops(100)
    assert not found.admitted(90, 90), "fewer blocks than a pool are too few to tell"
    assert found.admitted(90, 90)
    assert not found.admitted(90, 0), "if nothing comes back, there is nothing to spare"
    assert not found.admitted(90, 0)
    assert not found.admitted(30, 30), "if only two fifths come back, it is no loop"
    for _ in range(8):
        found.admitted(50, 50)
    assert found.admitted(10, 10), "old requests have little weight"
    assert found.admitted(1, 1), "a single block that comes back is worth as much as one of many"
    found.clear()
    assert not found.admitted(90, 90)


@pytest.mark.parametrize("index", INDEXES)
def test_conversations_in_turn_are_no_loop(index: IndexKind) -> None:
    """Each turn adds new blocks, and conversations end, so LFU spares none of their blocks."""
    cache = PrefixCache(POOL, SIZE, index=index, eviction=Eviction.LFU)
    assert isinstance(cache.pool.order, GreedyDual)
    rng = random.Random(5)
    talks: list[list[int]] = [[] for _ in range(40)]
    for _ in range(14):
        for talk in talks:
            talk += [rng.randrange(100_000) for _ in range(4 * SIZE)]
            play(cache, [talk])
            assert cache.pool.order.spared == 0
    assert cache.evicted_too_soon > POOL


@pytest.mark.parametrize("index", INDEXES)
def test_prompts_in_turn_may_begin_alike(index: IndexKind) -> None:
    """A fifth of each prompt of the loop is a common system prompt. It is hit anyway, so far more than a fifth of
    the tokens must be hit."""
    cache = PrefixCache(POOL, SIZE, index=index, eviction=Eviction.LFU)
    rng = random.Random(4)
    system = [rng.randrange(100_000) for _ in range(8 * SIZE)]
    prompts = [[*system, *[rng.randrange(100_000) for _ in range(32 * SIZE)]] for _ in range(60)]
    play(cache, prompts * 4)
    assert play(cache, prompts) > 0.2 + 0.3


@pytest.mark.parametrize("kind", INDEXES)
def test_the_cache_equals_its_model_while_nearly_all_that_recurs_is_spared(kind: IndexKind) -> None:
    class Machine(CacheMachine):
        index = kind

        @invariant()
        def as_much_is_spared_as_may_be(self) -> None:
            order = self.cache.pool.order
            if isinstance(order, GreedyDual):
                spared = [block for block in range(self.cache.pool.total) if order.is_spared(block)]
                assert len(spared) == order.spared <= loops.SPARED_SHARE * self.cache.pool.total
                assert all(self.cache._indexed.digests[block] for block in spared), (
                    "spared blocks are indexed, and full"
                )
                Machine.most = max(Machine.most, len(spared))

        most = 0

    with patch.object(loops, "LOST_SHARE", 0.01):
        run_state_machine_as_test(Machine, settings=settings(SETTINGS, max_examples=40))
    assert Machine.most > 2, "something was spared"
