"""The values that the fleet computes once for all pods equal each pod's own, and a run leaves no garbage."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import loadgen.simulate.pods.digests as digests
from engine.cache.prefix_cache import PrefixCache
from engine.contract.prefix_key import PrefixKey
from engine.sched.request import KeySpan
from loadgen.simulate.build import emulated_pods
from loadgen.simulate.fleet import FleetSpec
from loadgen.simulate.pods.digests import SharedDigests, SharingCache
from loadgen.simulate.prompts import SharedSpans
from loadgen.simulate.scenario import Scenario, play
from tests.loadgen.simulate.hand_made import TRACE, steady

PROMPTS = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from((1, 100, 512, 700, 1100))), min_size=1, max_size=4),
    min_size=1,
    max_size=6,
)


def ids(pieces: Sequence[tuple[int, int]]) -> array[int]:
    return array("i", [10_000 * kind + i for kind, tokens in pieces for i in range(tokens)])


@given(PROMPTS, st.sampled_from((1, 16, 48, 1024)), st.integers(0, 40))
@settings(deadline=None, max_examples=60)
def test_shared_digests_are_those_that_each_pod_would_make(
    prompts: list[list[tuple[int, int]]], block_size: int, answer: int
) -> None:
    shared = SharedDigests()
    pods = [SharingCache(100, block_size, shared) for _ in range(2)]
    alone = PrefixCache(100, block_size)
    for pieces in prompts:
        prompt = ids(pieces)
        expected = alone.open(prompt)
        alone.append(expected, range(answer))
        for pod in pods:
            sequence = pod.open(prompt)
            pod.append(sequence, range(answer))
            assert sequence.digests == expected.digests
            assert sequence.contents == expected.contents


def test_pods_of_a_fleet_hash_a_prefix_once_and_keep_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedDigests()
    one, other = SharingCache(500, 16, shared), SharingCache(500, 16, shared)
    prompt = ids([(0, 1024)])
    first, second = one.open(prompt), other.open(prompt)
    assert all(a is b for a, b in zip(first.digests, second.digests, strict=True))
    monkeypatch.setattr(digests, "_PIECES", 3)
    for kind in range(1, 9):
        one.open(ids([(kind, 1024)]))
    assert not any(a is b for a, b in zip(first.digests, other.open(prompt).digests, strict=True))


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=8))
def test_spans_are_the_keys_and_what_each_covers(chains: list[list[int]]) -> None:
    spans = SharedSpans(stride_bytes=256)
    for chain in chains:
        keys = tuple(PrefixKey(hash((i, *chain[: i + 1]))) for i in range(len(chain)))
        assert spans.of(keys) == tuple(KeySpan(key, 64 * (i + 1)) for i, key in enumerate(keys))


def test_a_run_makes_no_garbage_while_the_collector_is_off() -> None:
    scenario = Scenario(FleetSpec(emulated_pods(2)), steady(60, 0.02), TRACE, 60, seed=1)
    gc.collect()
    gc.disable()
    try:
        run = play(scenario, "predicted_ttft")
        assert gc.collect() < 60
        assert len(run.records) == 60
    finally:
        gc.enable()
    play(scenario, "predicted_ttft")
    assert gc.isenabled()
