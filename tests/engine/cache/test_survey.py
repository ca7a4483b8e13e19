"""What operators see of a cache: a survey, compared with the blocks themselves, and what was evicted too soon."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.eviction import Eviction
from engine.cache.ghosts import EvictedLately
from engine.cache.hashing import chain_digest, root_digest
from engine.cache.index import IndexKind
from engine.cache.prefix_cache import PrefixCache
from engine.cache.survey import MOST_PREFIXES

BLOCK = 4
PROMPTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(0, 2)), min_size=1, max_size=12
)  # (number of a common beginning, its tokens, number of the text that follows)


def answer(cache: PrefixCache, prompt: list[int], salt: str = "", *, keep: bool = False) -> int | None:
    """Admit the prompt, compute all of it and release it; return the tokens reused."""
    sequence = cache.open(prompt, salt)
    cached = cache.admit(sequence, len(prompt))
    if cached is not None:
        cache.begin_step()
        cache.end_step()
        cache.commit(sequence, len(prompt))
        if not keep:
            cache.release(sequence)
    return cached


def prompt_of(family: int, length: int, tail: int) -> list[int]:
    return [family] * length + [10 + tail] * 5


@settings(max_examples=60)
@given(
    total=st.integers(4, 40),
    prompts=PROMPTS,
    kept=st.integers(0, 3),
    eviction=st.sampled_from(Eviction),
    index=st.sampled_from((IndexKind.HASH, IndexKind.RADIX)),
)
def test_a_survey_counts_every_block_once(
    total: int, prompts: list[tuple[int, int, int]], kept: int, eviction: Eviction, index: IndexKind
) -> None:
    cache = PrefixCache(total, BLOCK, eviction=eviction, index=index)
    for i, made in enumerate(prompts):
        answer(cache, prompt_of(*made), keep=i < kept)
    seen = cache.survey().result(MOST_PREFIXES)
    blocks, tree = seen["blocks"], seen["tree"]
    cached = blocks["used_cached"] + blocks["idle"]
    assert sum(blocks.values()) == cache.pool.total
    assert cached == cache.indexed_blocks == sum(tree["blocks_by_tokens"].values()) == sum(seen["age_steps"].values())
    assert blocks["free"] + blocks["idle"] == cache.pool.available
    found = [prompt_of(*made) for made in prompts]
    chains = {tuple(p[:n]) for p in found for n in range(BLOCK, BLOCK * len(cache.find(cache.open(p), 9)) + 1, BLOCK)}
    children = Counter(chain[:-BLOCK] for chain in chains)
    assert {name: tree[name] for name in ("chains", "leaves", "branches", "deepest_tokens")} == {
        "chains": children[()],
        "leaves": sum(chain not in children for chain in chains),
        "branches": sum(children[chain] > 1 for chain in chains),
        "deepest_tokens": max(map(len, chains), default=0),
    }
    free = set(cache.pool.free_blocks())
    runs = "".join(".F"[block in free] for block in range(cache.pool.total)).replace(".", " ").split()
    assert seen["free_runs"] == {"runs": len(runs), "longest_blocks": max(map(len, runs), default=0)}
    uses = [one["uses"] for one in seen["hottest"]]
    assert uses == sorted(uses, reverse=True)
    assert all(use > 1 for use in uses)


def test_the_hottest_prefix_is_the_longest_that_is_as_hot() -> None:
    cache = PrefixCache(100, BLOCK)
    shared = list(range(3 * BLOCK))
    for tail in range(5):
        answer(cache, [*shared, *([100 + tail] * BLOCK), 1], "tenant", keep=tail == 0)
    (hottest,) = cache.survey().result(10)["hottest"]
    digest = root_digest(b"tenant")
    for start in range(0, len(shared), BLOCK):
        packed = b"".join(token.to_bytes(4, "little") for token in shared[start : start + BLOCK])
        digest = chain_digest(digest, packed)
    assert hottest["digest"] == digest.hex()[:16]
    assert (hottest["tokens"], hottest["running"]) == (3 * BLOCK, 1)
    assert hottest["uses"] > 2
    assert cache.survey().result(0)["hottest"] == []


def test_ages_are_in_steps() -> None:
    cache = PrefixCache(100, BLOCK)
    answer(cache, [1] * 8 + [2])
    for _ in range(9):
        cache.begin_step()
        cache.end_step()
    answer(cache, [3] * 4 + [2])
    assert cache.survey().result(1)["age_steps"] == {"<1": 1, "<16": 2}


@pytest.mark.parametrize("index", IndexKind)
def test_a_survey_of_an_empty_cache_has_nothing_but_free_blocks(index: IndexKind) -> None:
    seen = PrefixCache(10, BLOCK, index=index).survey().result(5)
    assert seen["blocks"] == {"used": 0, "used_cached": 0, "idle": 0, "free": 10}
    assert seen["tree"] == {"chains": 0, "leaves": 0, "branches": 0, "deepest_tokens": 0, "blocks_by_tokens": {}}
    assert seen["free_runs"] == {"runs": 1, "longest_blocks": 10}


def test_a_cache_that_is_off_is_surveyed_too() -> None:
    cache = PrefixCache(10, BLOCK, index=IndexKind.OFF)
    answer(cache, [1] * 9, keep=True)
    assert cache.survey().result(5)["blocks"] == {"used": 3, "used_cached": 0, "idle": 0, "free": 7}


def test_a_working_set_larger_than_the_pool_is_evicted_too_soon() -> None:
    """Five prompts repeat in order, with room for four: LRU evicts each just before it is needed again."""
    cache = PrefixCache(16, BLOCK)
    prompts = [[i] * 16 for i in range(5)]
    for prompt in prompts * 4:
        assert answer(cache, prompt) == 0
    assert cache.evictions == 4 * (len(prompts) * 4 - 4), "each prompt after the first four had to make room"
    asked_again = 4 * (len(prompts) * 4 - 5)
    assert 0.7 * asked_again <= cache.evicted_too_soon <= asked_again


def test_prompts_that_come_once_are_never_missed() -> None:
    cache = PrefixCache(16, BLOCK)
    for i in range(200):
        answer(cache, [1000 + i] * 16)
    assert cache.evictions > 100
    assert cache.evicted_too_soon == 0


@settings(max_examples=60)
@given(st.integers(1, 300), st.lists(st.integers(0, 400), max_size=200))
def test_what_is_taken_was_noted_and_is_taken_once(blocks: int, numbers: list[int]) -> None:
    """Every digest that is taken was noted before, which a set checks. Noted digests may be forgotten."""
    ghosts, noted = EvictedLately(blocks), set[int]()
    for i, number in enumerate(numbers):
        digest = root_digest(str(number).encode())
        if i % 3:
            ghosts.note([digest], [number])
            noted.add(number)
        elif uses := ghosts.take([digest], 0):
            assert number in noted
            assert uses == bytes([min(number, 15)])
            noted.discard(number)
    ghosts.clear()
    assert ghosts.take([root_digest(str(number).encode()) for number in numbers], 0) == b""


def test_blocks_of_a_chain_before_a_known_one_were_evicted_since() -> None:
    """A chain is evicted from its end, so blocks before a known evicted block were evicted after it, even if their
    digests have been overwritten."""
    ghosts, chain = EvictedLately(1000), [root_digest(str(number).encode()) for number in range(30)]
    ghosts.note([chain[3], chain[11]], [7, 2])
    assert ghosts.take(chain, 0) == bytes([7] * 4 + [2] * 8), "uses are those of the next known block"
    assert ghosts.take(chain, 0) == b"", "taken blocks are forgotten"
    ghosts.note([chain[20]], [1])
    assert ghosts.has(chain[20])
    assert ghosts.take(chain, 12) == b"", "after eight unknown blocks the search ends"
    assert ghosts.take(chain, 13) == bytes([1] * 8)
    assert not ghosts.has(chain[20])
