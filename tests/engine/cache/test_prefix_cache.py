"""Examples of cases that the stateful test covers in general, and values that other programs rely on."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.changes import KeyChanges
from engine.cache.held_keys import anchors
from engine.cache.index import IndexKind
from engine.cache.prefix_cache import MAX_KEYS_PER_BLOCK, PrefixCache
from engine.contract.events import Tier
from engine.contract.keys import PrefixKey
from engine.sched.request import KeySpan
from tests.engine.cache.integrity import check_integrity
from tests.walked import frozen, walked


def span(key: int, tokens: int) -> KeySpan:
    return KeySpan(PrefixKey(key), tokens)


def run(
    cache: PrefixCache, tokens: Sequence[int], spans: Sequence[KeySpan] = (), salt: str = "", is_checked: bool = True
) -> int:
    """Serve a request from admission to release; return its cached tokens."""
    sequence = cache.open(tokens, salt, spans)
    cached = cache.admit(sequence, len(tokens))
    assert cached is not None, "there is room"
    cache.commit(sequence, len(tokens))
    cache.release(sequence)
    if is_checked:
        check_integrity(cache)
    return cached


def test_two_identical_prompts_in_one_batch_keep_their_own_blocks() -> None:
    """mini-sglang frees the second request's pages here, while that request still reads them (see its `cache_req`)."""
    cache = PrefixCache(blocks_total=8, block_size=4)
    a, b = cache.open(range(8)), cache.open(range(8))
    assert cache.admit(a, 8) == cache.admit(b, 8) == 0
    own = list(b.blocks)
    cache.begin_step()
    cache.end_step()
    cache.commit(a, 8)
    cache.commit(b, 8)
    check_integrity(cache)
    assert b.blocks == own
    assert not set(own) & {*cache.pool.free_blocks(), *cache.pool.idle_blocks(), *a.blocks}
    cache.release(a)
    cache.append(b, (100, 101, 102, 103))
    assert cache.extend(b, 12)
    cache.commit(b, 12)
    check_integrity(cache)
    assert not set(b.blocks) & {*cache.pool.free_blocks(), *cache.pool.idle_blocks()}
    cache.release(b)
    check_integrity(cache)
    assert cache.pool.available == 8
    assert run(cache, [*range(8), 100, 101, 102, 103, 5]) == 12


def test_what_is_released_comes_free_with_the_last_step_begun_before() -> None:
    cache = PrefixCache(blocks_total=8, block_size=4)
    before, between = cache.open(range(8)), cache.open(range(10, 14))
    assert cache.admit(before, 8) == cache.admit(between, 4) == 0
    cache.begin_step()
    cache.release(before)
    cache.begin_step()
    cache.release(between)
    assert cache.pool.available == 5
    cache.end_step()
    assert cache.pool.available == 7
    check_integrity(cache)
    cache.end_step()
    assert cache.pool.available == 8
    check_integrity(cache)


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_prompt_of_whole_blocks_leaves_its_last_block_to_compute(blocks: int) -> None:
    cache = PrefixCache(blocks_total=10, block_size=4)
    tokens = list(range(4 * blocks))
    assert run(cache, tokens) == 0
    assert run(cache, tokens) == 4 * (blocks - 1)
    assert run(cache, [*tokens, 99]) == 4 * blocks


def test_partial_blocks_are_reused_before_anything_cached_is_evicted() -> None:
    cache = PrefixCache(blocks_total=3, block_size=4)
    run(cache, [1, 2, 3, 4, 5])
    run(cache, [6, 7, 8])
    run(cache, [9, 9, 9])
    assert run(cache, [1, 2, 3, 4, 5]) == 4


def test_eviction_takes_the_tail_of_the_oldest_chain_first() -> None:
    cache = PrefixCache(blocks_total=6, block_size=2)
    old, new = [1, 1, 2, 2, 3, 3], [4, 4, 5, 5, 6, 6]
    run(cache, old)
    run(cache, new)
    run(cache, [7])
    assert cache.count_hits(cache.open([*old, 0]), 7) == 4
    assert cache.count_hits(cache.open([*new, 0]), 7) == 6


def test_salts_share_nothing() -> None:
    cache = PrefixCache(blocks_total=8, block_size=2)
    assert run(cache, [1, 2, 3, 4, 5], salt="a") == 0
    assert run(cache, [1, 2, 3, 4, 5], salt="b") == 0
    assert run(cache, [1, 2, 3, 4, 5], salt="a") == 4


def test_disabled_cache_reuses_and_reports_nothing() -> None:
    cache = PrefixCache(blocks_total=8, block_size=2, index=IndexKind.OFF)
    for _ in range(2):
        assert run(cache, [1, 2, 3, 4, 5], [span(1, 4)]) == 0
    assert cache.held_keys() == ((), (), ())
    assert len(cache.pool.free_blocks()) == 8


def test_reset_frees_idle_blocks_and_bars_used_ones() -> None:
    cache = PrefixCache(blocks_total=8, block_size=2)
    run(cache, [1, 2, 3, 4, 5])
    running = cache.open([8, 8, 9, 9, 1])
    cache.admit(running, 5)
    cache.commit(running, 4)
    assert cache.reset() == 2
    cache.commit(running, 4)
    check_integrity(cache)
    assert cache.count_hits(cache.open([8, 8, 9, 9, 1]), 5) == 0
    cache.release(running)
    assert len(cache.pool.free_blocks()) == 8


def test_digests_are_the_documented_bytes() -> None:
    tokens = [1, 2, 70000, 4, 5]
    root = hashlib.sha256(b"tenant").digest()
    first = hashlib.sha256(root + struct.pack("<2i", 1, 2)).digest()
    second = hashlib.sha256(first + struct.pack("<2i", 70000, 4)).digest()
    assert PrefixCache(4, 2).open(tokens, "tenant").digests == [first, second]


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks_total"):
        PrefixCache(0, 16)


def test_key_is_held_while_its_whole_blocks_are() -> None:
    cache = PrefixCache(blocks_total=3, block_size=4)
    run(cache, range(12), [span(1, 2), span(2, 5), span(3, 11), span(4, 12)])
    keys = tuple(map(PrefixKey, (1, 2, 3, 4)))
    assert cache.held_keys() == (keys, (), ())
    assert cache.take_changes() == KeyChanges((), tuple((key, Tier.GPU) for key in keys))
    run(cache, [50, 51])
    assert cache.take_changes() == KeyChanges(removed=keys[3:])
    run(cache, [50, 51, 52, 53, 54, 55, 56, 57])
    assert cache.take_changes() == KeyChanges(removed=keys[2:3])
    run(cache, [70] * 12)
    assert cache.take_changes() == KeyChanges(removed=keys[1::-1])


def test_changes_that_cancel_out_are_not_reported() -> None:
    cache = PrefixCache(blocks_total=2, block_size=4)
    run(cache, range(8), [span(1, 4)])
    cache.reset()
    assert cache.take_changes() == KeyChanges()


def test_crowded_block_passes_keys_on_to_the_next() -> None:
    cache = PrefixCache(blocks_total=400, block_size=4)
    for n in range(3 * MAX_KEYS_PER_BLOCK):
        tokens = [1, 2, 3, 4, 1000 + n, 0, 0, 0, 5]
        run(cache, tokens, [span(1, 4), span(100 + n, 6), span(1000 + n, 8)])
    held = set(cache.held_keys()[0])
    assert all({1, 100 + n, 1000 + n} <= held for n in range(3 * MAX_KEYS_PER_BLOCK))


@given(
    counts=st.lists(st.integers(0, 50), max_size=8).map(sorted),
    prompt=st.integers(1, 40),
    block_size=st.integers(1, 9),
)
def test_anchors_cover_only_whole_blocks_of_the_prompt(counts: list[int], prompt: int, block_size: int) -> None:
    found = anchors([span(i, n) for i, n in enumerate(counts)], prompt, block_size)
    indexes = [index for index, _ in found]
    assert indexes == sorted(indexes)
    if found:
        assert [key for _, key in found] == list(range(len(counts)))
        assert indexes[0] >= 0
        assert (indexes[-1] + 1) * block_size <= prompt
    else:
        assert all(min(n, prompt) < block_size for n in counts)


@given(st.integers(0, 40), st.lists(st.integers(0, 12), max_size=4))
def test_forks_of_a_sequence_are_as_if_hashed_alone(length: int, answers: list[int]) -> None:
    cache = PrefixCache(8, 4)
    shared = cache.open(range(length), "tenant", (span(7, 8),))
    for number, more in enumerate(answers):
        alone, fork = cache.open(range(length), "tenant", (span(7, 8),)), shared.fork()
        for sequence in (alone, fork):
            cache.append(sequence, range(100 * number, 100 * number + more))
        assert (fork.digests, fork.contents, fork.anchors) == (alone.digests, alone.contents, alone.anchors)


def test_cached_blocks_are_nothing_that_the_garbage_collector_walks() -> None:
    """An engine has a million cached blocks, and a collection stops the engine."""

    cache = PrefixCache(blocks_total=10_001, block_size=4)
    with frozen():
        for i in range(1_000):
            run(cache, range(100 * i, 100 * i + 41), [span(100 * i + j, 4 * j) for j in range(1, 11)], is_checked=False)
        cache.take_changes()
        assert len(cache.pool.idle_blocks()) == 10_000
        assert walked() < 500
    check_integrity(cache)


def test_a_reset_keeps_the_columns_which_are_frozen() -> None:
    cache = PrefixCache(blocks_total=8, block_size=4)
    indexed, index = cache._indexed, cast(Any, cache._index)
    columns = [indexed.digests, indexed.parents, indexed.keys, index.of, index.contents]
    run(cache, range(9), [span(1, 4)])
    cache.reset()
    after = [indexed.digests, indexed.parents, indexed.keys, index.of, index.contents]
    assert all(a is b for a, b in zip(columns, after, strict=True))
    assert run(cache, range(9)) == 0


def test_a_chain_branches_off_only_where_another_one_has_gone_on() -> None:
    """Shared blocks that are evicted and computed again still count as shared, but no chain has continued them yet."""
    cache = PrefixCache(blocks_total=8, block_size=1)

    def shared_by(prompt: list[int]) -> int:
        sequence = cache.open(prompt)
        assert cache.admit(sequence, len(prompt)) is not None
        found = cache.branches_off(sequence)
        cache.commit(sequence, len(prompt))
        cache.release(sequence)
        return found

    assert [shared_by([1, 2, last]) for last in (3, 4, 5)] == [0, 2, 3]
    assert shared_by(list(range(10, 18))) == 0
    assert not cache.find(cache.open([1, 2]), 2), "all blocks were needed"
    assert [shared_by([1, 2]), shared_by([1, 2, 6])] == [0, 0]
    assert shared_by([1, 2, 7]) > 3
