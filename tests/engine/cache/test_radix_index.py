"""Examples, with the radix tree, of cases that the stateful test covers in general."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from engine.cache.eviction import Eviction
from engine.cache.index import IndexKind
from engine.cache.prefix_cache import PrefixCache
from engine.cache.radix_index import RadixIndex
from tests.engine.cache.integrity import check_integrity
from tests.walked import frozen, walked


def radix(blocks: int, block_size: int) -> PrefixCache:
    return PrefixCache(blocks, block_size, index=IndexKind.RADIX)


def run(
    cache: PrefixCache, prompt: Sequence[int], answer: Sequence[int] = (), salt: str = "", is_checked: bool = True
) -> int:
    """Serve a request from admission to release; return its cached tokens."""
    tokens = [*prompt, *answer]
    sequence = cache.open(prompt, salt)
    cached = cache.admit(sequence, len(prompt))
    assert cached is not None
    cache.commit(sequence, len(prompt), is_last=True)
    cache.append(sequence, answer)
    cache.extend(sequence, len(tokens))
    cache.commit(sequence, len(tokens), is_last=True)
    cache.release(sequence)
    if is_checked:
        check_integrity(cache)
    return cached


def tree(cache: PrefixCache) -> RadixIndex:
    assert isinstance(cache._index, RadixIndex)
    return cache._index


@pytest.mark.parametrize("block_size", [1, 16, 64, 256])
def test_saved_tokens_equal_shared_tokens_and_a_full_hit_computes_one(block_size: int) -> None:
    cache = radix(8192 // block_size + 64, block_size)
    system = list(range(2003))
    assert run(cache, [*system, 9001], [1, 2]) == 0
    assert run(cache, [*system, 9002], [3]) == 2003
    assert run(cache, [*system, 9002]) == 2003
    assert run(cache, system) == 2002
    assert run(cache, [*system[:1500], *range(5000, 5500)]) == 1500


def test_an_edge_is_split_where_two_prompts_first_differ_and_is_whole_again_without_the_second() -> None:
    cache = radix(6, 4)
    run(cache, range(10))
    run(cache, [*range(6), 50, 51])
    assert sorted((node.start, node.end) for node in tree(cache).nodes()) == [(0, 0), (0, 6), (6, 8), (6, 10)]
    run(cache, [90] * 16)
    assert sorted((node.start, node.end) for node in tree(cache).nodes()) == [(0, 0), (0, 8), (0, 16)]
    assert run(cache, [*range(6), 50, 51]) == 7


def test_a_conversation_leaves_one_block_that_is_not_full() -> None:
    cache = radix(40, 4)
    prompt = list(range(7))
    for turn in range(6):
        assert run(cache, prompt, [100 * turn, 7]) == (0 if turn == 0 else len(prompt) - 1)
        prompt += [100 * turn, 7, 200 * turn + 1]
        held = [block for block, digest in enumerate(cache._indexed.digests) if digest == b""]
        assert len(held) <= 1
    assert len(cache.pool.idle_blocks()) == cache.blocks_for(len(prompt) - 1)


def test_rows_are_not_shared_if_only_their_block_is_left() -> None:
    """Otherwise the request would never start: the block with the rows and its copy do not both fit."""
    cache = radix(3, 4)
    run(cache, range(10))
    assert run(cache, [*range(9), 70, 71]) == 8
    cache = radix(4, 4)
    run(cache, range(10))
    assert run(cache, [*range(9), 70, 71]) == 9


def test_the_block_that_rows_are_copied_from_is_kept_until_the_step_has_ended() -> None:
    cache = radix(4, 4)
    run(cache, range(6))
    reader = cache.open([*range(5), 70])
    assert cache.admit(reader, 6) == 5
    source = reader.source
    assert source is not None
    assert source not in reader.blocks
    assert cache.pool.available == 1, "of four blocks one is read whole, one is copied from, and one is written"
    other = cache.open([80, 81, 82, 83])
    assert cache.admit(other, 4) == 0
    assert source not in other.blocks
    cache.commit(reader, 6, is_last=True)
    assert reader.source is None
    assert cache.pool.available == 1
    check_integrity(cache)


def test_salts_and_resets_hide_rows_too() -> None:
    cache = radix(20, 4)
    assert run(cache, range(6), salt="a") == 0
    assert run(cache, range(6), salt="b") == 0
    assert run(cache, range(6), salt="a") == 5
    cache.reset()
    assert not tree(cache).roots
    assert not tree(cache)._salts, "forgotten salts take no memory"
    assert run(cache, range(6), salt="a") == 0


@pytest.mark.parametrize("eviction", Eviction)
def test_a_sequence_that_waits_finds_what_is_there_after_edges_were_split_merged_and_lost(eviction: Eviction) -> None:
    """The sequence goes on from where it last left the tree, and finds the same as one that begins at the root."""
    rng = random.Random(4)
    cache = PrefixCache(30, 3, index=IndexKind.RADIX, eviction=eviction)
    prompts = [[rng.randrange(2) for _ in range(rng.randrange(2, 30))] for _ in range(40)]
    waiting = [(cache.open(prompt), prompt) for prompt in prompts]
    found = 0
    for _ in range(200):
        run(cache, rng.choice(prompts))
        for sequence, prompt in rng.sample(waiting, 5):
            count = cache.count_hits(sequence, len(prompt))
            assert count == cache.count_hits(cache.open(prompt), len(prompt)) < len(prompt)
            found += count
    assert found > 200


def test_the_garbage_collector_walks_edges_and_not_blocks() -> None:
    cache = radix(10_001, 4)
    with frozen():
        for i in range(100):
            run(cache, range(1000 * i, 1000 * i + 400), is_checked=False)
        assert len(cache.pool.idle_blocks()) == 10_000
        assert walked() < 2_000, "a few objects for each of the 100 edges"
    check_integrity(cache)
