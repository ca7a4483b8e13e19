"""Blocks are evicted leaf-first, and in the same order as in a model that looks at every block."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.cache.eviction import _UNITS, MOST_USES, Eviction, GreedyDual, LeastRecentlyUsed
from engine.cache.prefix_cache import PrefixCache
from tests.engine.cache.integrity import check_integrity

BLOCKS = 12


class OrderMachine(RuleBasedStateMachine):
    """Chains grow, are used, pinned, spared, released and evicted. The model says which block each eviction takes."""

    is_lru = False

    @initialize(depth_cost=st.sampled_from([0.0, 0.25, 1.0]))
    def start(self, depth_cost: float) -> None:
        self.parents = [-1] * BLOCKS
        self.depths = [0] * BLOCKS
        self.depth_cost = depth_cost
        self.order: LeastRecentlyUsed | GreedyDual = (
            LeastRecentlyUsed() if self.is_lru else GreedyDual(self.parents, self.depths, depth_cost=depth_cost)
        )
        self.live: set[int] = set()
        self.used: dict[int, int] = {}
        """Block in use -> number of chains and pins that use it."""
        self.idle: dict[int, tuple[int, int]] = {}
        """Idle block -> its worth, and when it became idle (`turn`)."""
        self.floor = self.turn = 0
        self.chains: list[tuple[int, ...]] = []
        self.pins: list[tuple[int, ...]] = []
        self.left: dict[int, tuple[int, tuple[int, int]]] = {}
        """Block still in use at a chain's release -> its place in the order, with `floor` and `turn` at that time."""
        self.spared: set[int] = set()
        self.uses = [0] * BLOCKS

    def chain_to(self, block: int) -> tuple[int, ...]:
        chain = [block]
        while self.parents[chain[-1]] >= 0:
            chain.append(self.parents[chain[-1]])
        return tuple(reversed(chain))

    @precondition(lambda self: len(self.live) < BLOCKS)
    @rule(data=st.data())
    def begin_with_new_block(self, data: st.DataObject) -> None:
        """Append a new block to a chain, or begin a new chain with it."""
        parent = data.draw(st.sampled_from([-1, *sorted(self.live)]))
        block = min(set(range(BLOCKS)) - self.live)
        self.parents[block], self.depths[block] = parent, self.depths[parent] + 1 if parent >= 0 else 0
        self.uses[block] = 0
        before = self.chain_to(parent) if parent >= 0 else ()
        self.live.add(block)
        self.take((*before, block))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def use_again(self, data: st.DataObject) -> None:
        self.take(self.chain_to(data.draw(st.sampled_from(sorted(self.live)))))

    def take(self, chain: tuple[int, ...]) -> None:
        self.order.remove([block for block in chain if block in self.idle])
        for block in chain:
            self.idle.pop(block, None)
            self.used[block] = self.used.get(block, 0) + 1
            self.uses[block] += 1
        self.chains.append(chain)

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        chain = data.draw(st.sampled_from(self.chains))
        for block in chain:
            self.used[block] += 1
        self.pins.append(chain)

    @precondition(lambda self: self.chains and not self.is_lru)
    @rule(data=st.data())
    def spare(self, data: st.DataObject) -> None:
        assert isinstance(self.order, GreedyDual)
        chain = data.draw(st.sampled_from(self.chains))
        self.order.spare(chain)
        self.spared.update(chain)

    def worth(self, block: int, floor: int) -> int:
        if self.is_lru:
            return 0
        uses = MOST_USES if block in self.spared else min(self.uses[block], MOST_USES)
        return floor + uses * int(_UNITS * (1 + self.depth_cost * self.depths[block]))

    def drop(self, chain: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """Return the blocks that nothing uses any more, and those still in use, each from last to first."""
        for block in chain:
            self.used[block] -= 1
        resting = [block for block in reversed(chain) if not self.used[block]]
        for block in resting:
            del self.used[block]
        return resting, [block for block in reversed(chain) if block not in resting]

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        chain = data.draw(st.sampled_from(self.chains))
        self.chains.remove(chain)
        resting, staying = self.drop(chain)
        for block in resting:
            self.turn += 1
            self.idle[block] = (self.worth(block, self.floor), self.turn)
        self.order.add(resting, self.uses)
        place = self.order.places(len(staying))
        for i, block in enumerate(staying):
            self.turn += 1
            self.left[block] = (place + i, (self.floor, self.turn))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        """End a pin. Blocks that only the pin held return to the place that their last use gave them in the order."""
        chain = data.draw(st.sampled_from(self.pins))
        self.pins.remove(chain)
        resting, _ = self.drop(chain)
        for block in resting:
            floor, turn = self.left[block][1]
            self.idle[block] = (self.worth(block, floor), turn)
        self.order.put_back(resting, [self.left[block][0] for block in resting], self.uses)

    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        if count > len(self.idle):
            before = list(self.order)
            with pytest.raises(IndexError, match="fewer blocks are idle"):
                self.order.take(count)
            assert list(self.order) == before
            return
        taken = self.order.take(count)
        assert len(taken) == count
        for block in taken:
            leaves = [block for block in self.idle if not any(self.parents[other] == block for other in self.live)]
            assert block == min(leaves, key=lambda block: self.idle[block])
            self.floor = max(self.floor, self.idle.pop(block)[0])
            self.live.remove(block)
            self.spared.discard(block)

    @rule(really=st.sampled_from([False] * 7 + [True]))
    def clear(self, really: bool) -> None:
        if really and not self.used:
            self.order.clear()
            self.idle.clear()
            self.live.clear()
            self.spared.clear()

    @invariant()
    def holds_the_idle(self) -> None:
        assert len(self.order) == len(self.idle)
        listed = list(self.order)
        assert sorted(listed) == sorted(self.idle)
        assert all(
            self.parents[block] not in self.idle or listed.index(block) < listed.index(self.parents[block])
            for block in listed
        )
        if isinstance(self.order, GreedyDual):
            assert self.order.spared == len(self.spared)
            assert {block for block in range(BLOCKS) if self.order.is_spared(block)} == self.spared


class OldestMachine(OrderMachine):
    is_lru = True


@pytest.mark.parametrize("machine", [OrderMachine, OldestMachine])
def test_the_least_worth_leaf_goes_first(machine: type[OrderMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=60, deadline=None))


def served(cache: PrefixCache, tokens: list[int]) -> int:
    """Serve one request; return the number of tokens it reused."""
    sequence = cache.open(tokens)
    cached = cache.admit(sequence, len(tokens))
    assert cached is not None
    cache.commit(sequence, len(tokens))
    cache.release(sequence)
    return cached


@pytest.mark.parametrize("eviction", Eviction)
def test_a_flood_of_prompts_that_come_once_leaves_a_shared_prefix(eviction: Eviction) -> None:
    """Four of five prompts occur once. Between two uses of the prefix, they need twice the pool's number of blocks."""
    cache = PrefixCache(200, 1, eviction=eviction)
    shared = list(range(1, 41))
    fresh = 1000
    hits = []
    for _ in range(60):
        hits.append(served(cache, [*shared, fresh]))
        fresh += 1
        if len(hits) > 4:  # by now the cache knows that the prefix is shared
            for _ in range(4):
                served(cache, list(range(fresh, fresh + 100)))
                fresh += 100
    kept = sum(hits[5:]) / len(hits[5:]) / len(shared)
    assert (kept < 0.1) if eviction is Eviction.LRU else (kept > 0.9)


@pytest.mark.parametrize("eviction", [Eviction.LFU, Eviction.COST])
@pytest.mark.parametrize(("pool", "least"), [(700, 0.5), (900, 0.85)])
def test_a_flood_does_not_flush_prefixes_that_take_most_of_the_pool(
    eviction: Eviction, pool: int, least: float
) -> None:
    """Eight prefixes have 64 blocks each. Each request with a prefix is followed by four prompts of 64 blocks that
    occur only once. So between two uses of a prefix, other blocks fill about three pools. At first most prefixes are
    evicted."""
    cache, rng = PrefixCache(pool, 1, eviction=eviction), random.Random(1)
    prefixes = [list(range(64 * i + 1, 64 * i + 65)) for i in range(8)]
    fresh, hits = 10_000, 0
    for i in range(600):
        cached = served(cache, [*rng.choice(prefixes), fresh])
        hits += cached if i >= 200 else 0
        for _ in range(4):
            fresh += 64
            served(cache, list(range(fresh, fresh + 64)))
    assert hits / (400 * 64) > least


def test_what_was_shared_counts_as_shared_when_it_comes_back() -> None:
    cache = PrefixCache(100, 1, eviction=Eviction.LFU)
    shared, talk = list(range(1, 31)), list(range(101, 131))
    for i in range(4):
        served(cache, [*shared, 900 + i])
        served(cache, [*talk, *range(1000, 1001 + i)])
    for i in range(4):  # these evict everything: with the prompts before, they fill the pool about five times
        served(cache, list(range(5000 + 100 * i, 5100 + 100 * i)))
    assert cache.indexed_blocks == 100
    for prompt, uses in ((shared, 5), (talk, 1)):
        assert served(cache, [*prompt, 950, 951]) == 0
        assert cache.pool.uses(cache.find(cache.open(prompt), 30)[-1]) == uses


@pytest.mark.parametrize("eviction", Eviction)
def test_what_was_shared_long_ago_goes(eviction: Eviction) -> None:
    cache = PrefixCache(100, 1, eviction=eviction)
    shared = list(range(1, 41))
    for i in range(50):
        served(cache, [*shared, 1000 + i])
    for i in range(2 * MOST_USES):
        served(cache, list(range(5000 + 100 * i, 5090 + 100 * i)))
    assert served(cache, [*shared, 999]) == 0


@pytest.mark.parametrize("eviction", [Eviction.LFU, Eviction.COST])
def test_a_conversation_that_goes_on_is_no_shared_prefix(eviction: Eviction) -> None:
    """Each turn reuses all earlier turns, but after the conversation's end nobody asks for its blocks again."""
    cache = PrefixCache(100, 1, eviction=eviction)
    for turn in range(1, 6):
        served(cache, list(range(1, 10 * turn)))
    served(cache, list(range(500, 590)))
    served(cache, list(range(600, 690)))
    assert served(cache, list(range(1, 50))) == 0


def test_absurd_costs_leave_the_depth_cost_between_0_and_1() -> None:
    cache = PrefixCache(50, 1, eviction=Eviction.COST)
    for token_s, attention_s in ((0.0, 0.0), (1e-6, 1e9), (1e-4, 1e-8)):
        cache.learn_cost(token_s, attention_s)
        served(cache, list(range(int(attention_s) % 7, 40)))
        assert cache._worth is not None
        assert math.isfinite(cache._worth.depth_cost)
        assert 0 <= cache._worth.depth_cost <= 1
    check_integrity(cache)


@pytest.mark.parametrize("eviction", [Eviction.LFU, Eviction.COST])
def test_if_cost_counts_expensive_blocks_outlive_later_cheap_ones(eviction: Eviction) -> None:
    """A token after many others takes longer to compute. By uses alone, the oldest block would be evicted first."""
    cache = PrefixCache(40, 1, eviction=eviction)
    cache.learn_cost(1e-6, 1e-6)
    served(cache, list(range(1, 31)))
    for i in range(15):
        served(cache, [100 + i])
    assert (served(cache, list(range(1, 31))) == 29) is (eviction is Eviction.COST)


def test_two_uses_of_a_cheap_block_are_worth_less_than_one_of_a_block_two_and_a_half_times_as_dear() -> None:
    order = GreedyDual([-1, -1], [0, 6], depth_cost=0.25)
    order.add([0, 1], [2, 1])
    assert list(order.take(1)) == [0]
