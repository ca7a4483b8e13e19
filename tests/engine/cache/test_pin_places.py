"""A pin that is over leaves no trace in the order of eviction: its blocks are where their last use put them."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.eviction import Eviction
from engine.cache.index import IndexKind
from engine.cache.prefix_cache import PrefixCache
from tests.engine.cache.integrity import check_integrity

BLOCK = 2
PROMPTS = st.lists(st.sampled_from([1, 1, 2]), min_size=2, max_size=14)
Operation = tuple[Literal["serve", "pin", "wait"], list[int], float]
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["serve", "serve", "pin", "wait"]), PROMPTS, st.sampled_from([1.0, 5.0, 50.0])),
    min_size=1,
    max_size=25,
)


def order_after(operations: list[Operation], index: IndexKind, eviction: Eviction, *, kept: str) -> list[int]:
    """Return the blocks in order of eviction after all operations, when every pin has ended. Nothing is evicted, so the
    blocks have the same numbers whatever is pinned."""
    cache = PrefixCache(512, BLOCK, index=index, eviction=eviction, pinned_blocks=256, learnt_blocks=256)
    now_s = 0.0
    for operation, tokens, seconds in operations:
        if operation == "wait":
            now_s += seconds
            cache.advance(now_s)
            continue
        sequence = cache.open(tokens)
        assert cache.admit(sequence, len(tokens)) is not None
        cache.commit(sequence, len(tokens), is_last=True)
        if operation == "pin" and kept:
            cache.keep(sequence, len(sequence.nodes), seconds, is_asked=kept == "asked")
        cache.release(sequence)
        check_integrity(cache)
    cache.advance(now_s + 1000.0)
    check_integrity(cache)
    assert not cache.pins
    assert not cache.learnt
    return list(cache.pool.idle_blocks())


@pytest.mark.parametrize("index", [IndexKind.HASH, IndexKind.RADIX])
@pytest.mark.parametrize(
    ("eviction", "kept"),
    [(Eviction.LRU, "asked"), (Eviction.LRU, "learnt"), (Eviction.LFU, "asked"), (Eviction.COST, "asked")],
)
@settings(max_examples=30, deadline=None)
@given(operations=OPERATIONS)
def test_an_expired_pin_is_where_its_last_use_left_it(
    operations: list[Operation], index: IndexKind, eviction: Eviction, kept: str
) -> None:
    """Blocks kept by a wrong guess are the exception: LFU and COST evict them before other blocks."""
    without = order_after(operations, index, eviction, kept="")
    assert order_after(operations, index, eviction, kept=kept) == without


@pytest.mark.parametrize("eviction", Eviction)
def test_what_was_pinned_long_ago_goes_before_what_was_used_since(eviction: Eviction) -> None:
    cache = PrefixCache(12, 1, eviction=eviction, pinned_blocks=4)

    def serve(tokens: list[int], lifetime_s: float = 0.0) -> None:
        sequence = cache.open(tokens)
        assert cache.admit(sequence, len(tokens)) is not None
        cache.commit(sequence, len(tokens))
        if lifetime_s:
            assert cache.keep(sequence, 4, lifetime_s) == 4
        cache.release(sequence)

    serve([1, 2, 3, 4], 10.0)
    serve([11, 12, 13, 14])
    serve([21, 22, 23, 24])
    cache.advance(11.0)
    serve([31, 32, 33, 34])
    assert [len(cache.find(cache.open([n, n + 1, n + 2, n + 3]), 4)) for n in (1, 11, 21, 31)] == [0, 4, 4, 4]
    check_integrity(cache)


@pytest.mark.parametrize("eviction", [Eviction.LFU, Eviction.COST])
def test_wrong_guesses_go_before_all_that_was_used_and_what_was_shared_keeps_its_place(eviction: Eviction) -> None:
    """If blocks were kept for a request that never came, they are worth less than other blocks that were used once."""

    def served(*, kept: bool) -> tuple[PrefixCache, set[int]]:
        """Return a cache after some requests, and the blocks that were kept by a guess and used only once."""
        cache, in_vain = PrefixCache(64, 1, eviction=eviction, learnt_blocks=32), set[int]()
        for tokens, is_guess in (([1, 2, 3], False), ([4, 5, 6], True), ([7, 8, 9], True), ([7, 8, 10], False)):
            sequence = cache.open(tokens)
            assert cache.admit(sequence, len(tokens)) is not None
            cache.commit(sequence, len(tokens))
            if is_guess:
                in_vain.update(sequence.nodes)
                if kept:
                    assert cache.keep(sequence, 3, 10.0, is_asked=False) == 3
            cache.release(sequence)
        cache.advance(10.0)
        assert not cache.learnt
        return cache, {block for block in in_vain if cache.pool.uses(block) == 1}

    (cache, in_vain), (without, the_same) = served(kept=True), served(kept=False)
    assert in_vain == the_same
    assert len(in_vain) == 4, "two of the six blocks were shared, so they were used again"
    order = list(cache.pool.idle_blocks())
    assert set(order[:4]) == in_vain
    assert order[4:] == [block for block in without.pool.idle_blocks() if block not in in_vain]
    check_integrity(cache)
