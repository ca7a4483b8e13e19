"""What is believed about the cache of a pod that publishes nothing, compared with an LRU cache."""

from __future__ import annotations

import math
import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.events import Keys
from engine.contract.keys import PrefixKey
from router.registry.cache_estimate import ENOUGH_SIGNS, CacheEstimate, Taken
from router.registry.index import Match, PrefixIndex
from router.views.types import PodId

POD = PodId("pod")
KEY_TOKENS = 64
BLOCK = 16


class Cache:
    """A pod with room for `capacity` tokens: keys, and each request's tokens without keys. It evicts by LRU."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: OrderedDict[int | str, int] = OrderedDict()
        self.count = 0

    def ask(self, keys: Keys, loose: int) -> int:
        """Return how many leading keys were held."""
        hits = next((i for i, key in enumerate(keys) if key not in self.held), len(keys))
        if loose:  # engines evict the end of a request first
            self.count += 1
            self.held[f"loose {self.count}"] = loose
        for key in reversed(keys):
            self.held[key] = KEY_TOKENS
            self.held.move_to_end(key)
        while sum(self.held.values()) > self.capacity:
            self.held.popitem(last=False)
        return hits


def prompt(name: int, keys: int) -> Keys:
    return tuple(PrefixKey(name * 1000 + i) for i in range(keys))


def taken(keys: int, loose: int, capacity: int | None) -> Taken:
    return Taken(keys * KEY_TOKENS + loose, KEY_TOKENS, capacity, BLOCK)


REQUESTS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12), st.integers(0, 8)), max_size=60)


@given(REQUESTS, st.integers(20, 80))
@settings(max_examples=150)
def test_belief_is_what_an_lru_cache_of_the_told_size_holds_but_for_what_is_given_up_ahead(
    requests: list[tuple[int, int, int]], capacity_keys: int
) -> None:
    capacity = capacity_keys * KEY_TOKENS
    cache, index = Cache(capacity), PrefixIndex()
    for at_s, (name, length, blocks) in enumerate(requests):
        keys = prompt(name, length)
        index.speculate(POD, keys, float(at_s), math.inf, taken(length, blocks * BLOCK, capacity))
        cache.ask(keys, blocks * BLOCK)
        assert index.free_tokens.of(POD) <= capacity
        for other in range(1, 10):
            chain = prompt(other, 12)
            believed = index.match(chain, float(at_s)).get(POD, Match(0)).strides
            held = next((i for i, key in enumerate(chain) if key not in cache.held), len(chain))
            assert believed <= held  # nothing is believed that an LRU cache has evicted
    all_believed = sum(len(keys) for _, keys in index.assumed(POD)) * KEY_TOKENS
    all_held = sum(tokens for key, tokens in cache.held.items() if isinstance(key, int))
    assert all_believed >= all_held - capacity / 64 - 2 * KEY_TOKENS - 8 * BLOCK


def test_what_two_requests_share_is_counted_once_and_lasts_while_either_is_used() -> None:
    index = PrefixIndex()
    shared = prompt(1, 8)
    for i in range(4):
        keys = (*shared, PrefixKey(100 + i))
        index.speculate(POD, keys, float(i), math.inf, taken(9, 0, 2000))
    assert index.free_tokens.of(POD) == 2000 - 12 * KEY_TOKENS
    index.speculate(POD, prompt(2, 20), 9.0, math.inf, taken(20, 0, 2000))
    assert index.match(prompt(2, 20), 9.0)[POD] == Match(20)
    assert index.match(shared, 9.0)[POD] == Match(8)


def test_answers_take_room_though_no_key_stands_for_them() -> None:
    index = PrefixIndex()
    index.speculate(POD, prompt(1, 4), 0.0, math.inf, taken(4, 1000, 1500))
    assert index.free_tokens.of(POD) == 1500 - 4 * KEY_TOKENS - 1008  # 1,000 tokens take whole blocks
    index.speculate(POD, prompt(2, 4), 1.0, math.inf, taken(4, 1000, 1500))
    assert index.match(prompt(1, 4), 1.0)[POD] == Match(3)


def test_a_pod_that_tells_no_capacity_is_believed_as_long_as_asked_for() -> None:
    index = PrefixIndex()
    for i in range(100):
        index.speculate(POD, prompt(i, 10), 1.0, 600.0, taken(10, 200, None))
    assert index.free_tokens.of(POD) == math.inf
    assert all(index.match(prompt(i, 10), 500.0)[POD] == Match(10) for i in range(100))
    assert not index.match(prompt(3, 10), 700.0)


@pytest.mark.parametrize("told", [None, 2.0, 1.0, 0.7])
def test_answers_correct_the_capacity_both_ways(told: float | None) -> None:
    """A cache holds some 8 of 12 equally popular prefixes. The pod reports no size, the right one or a wrong one."""
    capacity = 8 * 12 * KEY_TOKENS
    rng = random.Random(1)
    cache, index = Cache(capacity), PrefixIndex()
    says = None if told is None else round(told * capacity)
    wrong = 0
    for i in range(3000):
        now_s, keys = 10.0 * i, prompt(rng.randrange(12), 12)
        believed = index.match(keys, now_s).get(POD, Match(0)).strides
        index.speculate(POD, keys, now_s, 1e9, taken(12, 0, says))
        held = cache.ask(keys, 0)
        if held < believed - 2:
            index.refute(POD, keys, held, now_s)
            index.speculate(POD, keys, now_s, 1e9, Taken(0, KEY_TOKENS, says, BLOCK))
        elif held > believed + 2:
            index.was_held(POD, keys, believed, float((held - believed) * KEY_TOKENS))
        wrong += i >= 2000 and abs(held - believed) > 2
    assert wrong < 100  # of 1,000 beliefs, of which 330 are about requests that miss


def test_an_emptied_cache_does_not_count_as_a_small_one_for_long() -> None:
    room = CacheEstimate(64)
    room.take(Taken(100, KEY_TOKENS, 10_000, BLOCK), 1, 0.0)
    room.was_evicted(0.0)
    assert room.capacity_tokens == pytest.approx(9000)
    room.given_up([PrefixKey(1)], 500.0)
    room.given_up([PrefixKey(2)], 4000.0)
    assert room.was_held(PrefixKey(1))
    assert room.capacity_tokens == pytest.approx(9400)
    assert not room.was_held(PrefixKey(1))  # the key is no longer among those given up
    for _ in range(1000):
        room.was_evicted(0.0)
    assert room.capacity_tokens == 10_000 / 16


def test_what_is_evicted_and_asked_for_again_is_regretted_and_what_is_not_is_not() -> None:
    index = PrefixIndex()
    for i in range(50):
        index.speculate(POD, prompt(i, 10), float(i), math.inf, taken(10, 0, 1000))
    assert index.regret == 0.0
    for i in range(50, 200):
        index.speculate(POD, prompt(i % 3, 10), float(i), math.inf, taken(10, 0, 1000))
    assert index.regret > 0.5


def test_ghosts_and_losses_are_bounded() -> None:
    index = PrefixIndex(speculative_limit=512)
    for i in range(5000):
        index.speculate(POD, prompt(i, 10), float(i), math.inf, taken(10, 0, 1000))
    index.drop(POD)
    while index.sweep(1000):
        pass
    assert len(index) == 0
    assert index.free_tokens.of(POD) == math.inf


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3)), min_size=1, max_size=300), st.integers(8, 40))
@settings(max_examples=100)
def test_loose_tokens_take_a_bounded_number_of_entries_and_are_given_up_in_the_order_of_their_use(
    requests: list[tuple[int, int]], limit: int
) -> None:
    """`requests`: blocks of loose tokens (tokens without a key), and seconds since the previous request. The pod
    reports no capacity, so nothing is given up for lack of room."""
    room = CacheEstimate(limit)
    now_s, exact = 0, dict[int, int]()
    for blocks, pause_s in requests:
        now_s += pause_s
        room.take(taken(0, blocks * BLOCK, None), 0, float(now_s))
        exact[now_s] = exact.get(now_s, 0) + blocks * BLOCK
    total = sum(exact.values())
    assert room.loose_tokens == total
    most = max(4 * total / limit, 50 * BLOCK)  # no entry is larger than this
    gone = due = entries = 0
    for used_at_s, tokens in exact.items():
        given = room.give_up(float(used_at_s))
        due += tokens
        gone += round(given)
        entries += given > 0
        assert due - most <= gone <= due
        assert room.loose_tokens == total - gone
    assert gone == total
    assert entries <= limit


def test_keys_used_before_a_forgotten_one_count_only_if_the_capacity_is_known() -> None:
    unknown, told = CacheEstimate(64), CacheEstimate(64)
    for second in range(10):
        unknown.take(taken(0, BLOCK, None), 0, float(second))
        told.take(taken(0, BLOCK, 4096), 0, float(second))
    unknown.dropped(3.0)
    told.dropped(3.0)
    assert unknown.loose_tokens == 6 * BLOCK
    assert told.loose_tokens == 10 * BLOCK


def test_what_a_key_stands_for_is_the_mean_of_the_first_requests_and_then_follows() -> None:
    """The first request's tokens are estimated before any answer shows the model's tokens per byte. So this estimate
    must not outweigh a hundred later ones."""
    room = CacheEstimate(64)
    for number, key_tokens in enumerate((64.0, *[107.0] * 9)):
        room.take(Taken(1000, key_tokens, 20_480, BLOCK), 9, float(number))
    assert room.key_tokens == pytest.approx((64 + 9 * 107) / 10)
    for number in range(200):
        room.take(Taken(1000, 50.0, 20_480, BLOCK), 9, 10.0 + number)
    assert room.key_tokens == pytest.approx(50, rel=0.03)


def test_a_room_begins_with_what_another_gateway_has_learnt_of_the_pod() -> None:
    index, other = PrefixIndex(), PodId("other")
    index.expect_capacities({POD: (3000.0, 2000), other: (9e9, 2000)})
    assert index.capacity_is_told(POD)
    for pod in (POD, other):
        index.speculate(pod, prompt(1, 4), 0.0, math.inf, taken(4, 0, 2000))
    assert index.learnt_capacity(POD) == (3000.0, 2000)
    assert index.learnt_capacity(other) == (4000.0, 2000)  # never more than twice what was reported
    index.speculate(POD, prompt(1, 4), 1.0, math.inf, taken(4, 0, 4000))  # a larger cache of the same kind
    assert index.learnt_capacity(POD) == (6000.0, 4000)
    assert index.learnt_capacity(PodId("new")) is None


def test_a_pod_that_held_nothing_may_state_a_capacity_later() -> None:
    """Its metrics may be read only after its first requests, whose prefixes were gone each time."""
    index, now_s = PrefixIndex(), 0.0
    for _ in range(ENOUGH_SIGNS + 1):
        for _ in range(2):
            now_s += 100.0
            index.speculate(POD, prompt(1, 1), now_s, math.inf, taken(1, 0, None))
        index.refute(POD, prompt(1, 1), 0, now_s)
    assert index.free_tokens.of(POD) == 0.0
    for capacity in (10_000, 20_000):
        index.speculate(POD, prompt(1, 1), now_s, math.inf, taken(1, 0, capacity))
        assert index.free_tokens.of(POD) == capacity - KEY_TOKENS
