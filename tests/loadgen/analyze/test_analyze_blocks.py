"""The trie of runs, exact prefixes and simulated caches, compared with slow and obvious programs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.analyze.align import common_bytes
from loadgen.analyze.blocks import KeyLog, Sharing, fold, hit_rate
from loadgen.analyze.cache import Simulation
from loadgen.analyze.exact import ExactMatcher
from tests.loadgen.analyze.prompts import brute_prefix_bytes

STRIDE = 4
# Prompts are made of recurring pieces of few letters, so they share prefixes of every length, also within blocks.
PIECES = st.lists(st.sampled_from([b"a", b"b", b"aaaa", b"abab", b"abababab", b"aaaabbbb"]), max_size=6).map(b"".join)
PROMPTS = st.lists(PIECES, min_size=1, max_size=25)


def folded(prompts: Sequence[bytes]) -> Sharing:
    log = KeyLog(1)
    for prompt in prompts:
        log.add_text(prompt, STRIDE, len(prompt) / STRIDE)
    return fold(log)


@given(PROMPTS)
def test_hits_of_an_infinite_cache_are_the_longest_prefixes_seen_before(prompts: list[bytes]) -> None:
    sharing = folded(prompts)
    matcher = ExactMatcher(sharing, STRIDE)
    found = [matcher.match(number, prompt) for number, prompt in enumerate(prompts)]
    wanted = brute_prefix_bytes(prompts)
    assert found == wanted
    assert sharing.hit_blocks.tolist() == [length // STRIDE for length in wanted]
    total = sum(map(len, prompts)) / STRIDE
    assert sharing.hit_rate() == pytest.approx(sum(length // STRIDE for length in wanted) / total if total else 0.0)


@given(PROMPTS)
def test_runs_make_up_the_prompts(prompts: list[bytes]) -> None:
    sharing = folded(prompts)
    assert len(sharing.run_blocks) <= 2 * len(prompts)
    for path, prompt in zip(sharing.paths(), prompts, strict=True):
        assert sum(sharing.run_blocks[run] for run in path) == len(prompt) // STRIDE
    assert sharing.run_blocks.sum() == len(
        {prompt[: STRIDE * n] for prompt in prompts for n in range(1, 99) if len(prompt) >= STRIDE * n}
    )


@given(PROMPTS, st.integers(0, 12), st.integers(1, 3), st.integers(0, 5))
def test_caches_are_lru_over_blocks(prompts: list[bytes], capacity: int, pods: int, seed: int) -> None:
    sharing = folded(prompts)
    simulation = Simulation(sharing, pods, seed)
    fleet = simulation.fleet(capacity)
    total = sum(map(len, prompts)) / STRIDE or 1.0
    alone = [0] * len(prompts)
    assert fleet.one_pod * total == pytest.approx(block_lru(prompts, capacity, alone))
    assert fleet.perfect_affinity * total == pytest.approx(block_lru(prompts, capacity * pods, alone))
    assert fleet.random_routing <= simulation.fleet(None).random_routing <= simulation.fleet(None).one_pod


def block_lru(prompts: Sequence[bytes], capacity: int, pod_of: Sequence[int]) -> int:
    """Count the blocks hit with one cache per pod; a prompt's last block is evicted before its first."""
    caches: dict[int, OrderedDict[bytes, None]] = {}
    hits = 0
    for prompt, pod in zip(prompts, pod_of, strict=True):
        cache = caches.setdefault(pod, OrderedDict())
        blocks = [prompt[: STRIDE * n] for n in range(1, len(prompt) // STRIDE + 1)]
        for block in blocks:
            if block not in cache:
                break
            hits += 1
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


def test_random_routing_splits_what_pods_hold() -> None:
    prompts = [b"aaaabbbb"] * 400
    fleet = Simulation(folded(prompts), 4, 1).fleet(None)
    # Each of the four pods computes the prompt once.
    assert fleet.random_routing == pytest.approx(1 - 4 / 400)
    assert fleet.perfect_affinity == pytest.approx(1 - 1 / 400)


@given(PROMPTS)
def test_the_rate_without_the_trie_is_the_same(prompts: list[bytes]) -> None:
    log = KeyLog(1)
    for prompt in prompts:
        log.add_text(prompt, STRIDE, len(prompt) / STRIDE)
    assert hit_rate(log) == pytest.approx(fold(log).hit_rate())


@given(st.binary(max_size=300), st.binary(max_size=300), st.binary(max_size=300))
def test_common_bytes_counts_to_the_first_difference(head: bytes, a: bytes, b: bytes) -> None:
    left, right = head + a, head + b
    length = common_bytes(left, 0, right, 0)
    assert left[:length] == right[:length]
    assert len(left) == length or len(right) == length or left[length] != right[length]
