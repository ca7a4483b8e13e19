"""The orders of eviction: equal to a model that looks at every block, and leaf-first."""

from __future__ import annotations

import math

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

from engine.cache.eviction import _UNITS, MOST_USES, Eviction, GreedyDual
from engine.cache.prefix_cache import PrefixCache

BLOCKS = 12


class WorthMachine(RuleBasedStateMachine):
    """Chains grow, are used, rest and are evicted; every eviction is the one that the definition names."""

    @initialize(depth_cost=st.sampled_from([0.0, 0.25, 1.0]))
    def start(self, depth_cost: float) -> None:
        self.parents = [-1] * BLOCKS
        self.depths = [0] * BLOCKS
        self.depth_cost = depth_cost
        self.order = GreedyDual(self.parents, self.depths, depth_cost=depth_cost)
        self.live: set[int] = set()
        self.used: dict[int, int] = {}
        """Blocks in use -> by how many chains."""
        self.idle: dict[int, tuple[int, int]] = {}
        """Idle blocks -> worth and turn."""
        self.floor = self.turn = 0
        self.chains: list[tuple[int, ...]] = []
        self.uses = [0] * BLOCKS

    def chain_to(self, block: int) -> tuple[int, ...]:
        chain = [block]
        while self.parents[chain[-1]] >= 0:
            chain.append(self.parents[chain[-1]])
        return tuple(reversed(chain))

    @precondition(lambda self: len(self.live) < BLOCKS)
    @rule(data=st.data())
    def begin_with_new_block(self, data: st.DataObject) -> None:
        """A request goes on behind some block that is there, or behind none."""
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
    def release(self, data: st.DataObject) -> None:
        chain = data.draw(st.sampled_from(self.chains))
        self.chains.remove(chain)
        resting = []
        for block in reversed(chain):
            self.used[block] -= 1
            if not self.used[block]:
                del self.used[block]
                resting.append(block)
                self.turn += 1
                cost = int(_UNITS * (1 + self.depth_cost * self.depths[block]))
                self.idle[block] = (self.floor + min(self.uses[block], MOST_USES) * cost, self.turn)
        self.order.add(resting, self.uses)

    @rule()
    def evict(self) -> None:
        if not self.idle:
            with pytest.raises(IndexError, match="no block is idle"):
                self.order.pop()
            return
        leaves = [block for block in self.idle if not any(self.parents[other] == block for other in self.live)]
        expected = min(leaves, key=lambda block: self.idle[block])
        assert self.order.pop() == expected
        self.floor = max(self.floor, self.idle.pop(expected)[0])
        self.live.remove(expected)

    @rule(really=st.sampled_from([False] * 7 + [True]))
    def clear(self, really: bool) -> None:
        if really and not self.used:
            self.order.clear()
            self.idle.clear()
            self.live.clear()

    @invariant()
    def holds_the_idle(self) -> None:
        assert len(self.order) == len(self.idle)
        listed = list(self.order)
        assert sorted(listed) == sorted(self.idle)
        assert all(
            self.parents[block] not in self.idle or listed.index(block) < listed.index(self.parents[block])
            for block in listed
        )


def test_the_least_worth_leaf_goes_first() -> None:
    run_state_machine_as_test(WorthMachine, settings=settings(max_examples=200, stateful_step_count=60, deadline=None))


def served(cache: PrefixCache, tokens: list[int]) -> int:
    """Serve one request; the tokens it reused."""
    sequence = cache.open(tokens)
    cached = cache.admit(sequence, len(tokens))
    assert cached is not None
    cache.commit(sequence, len(tokens))
    cache.release(sequence)
    return cached


@pytest.mark.parametrize("eviction", Eviction)
def test_a_flood_of_prompts_that_come_once_leaves_a_shared_prefix(eviction: Eviction) -> None:
    """Four of five prompts come once, and twice as many blocks as the pool has come between two uses of the prefix."""
    cache = PrefixCache(200, 1, eviction=eviction)
    shared = list(range(1, 41))
    fresh = 1000
    hits = []
    for _ in range(60):
        hits.append(served(cache, [*shared, fresh]))
        fresh += 1
        if len(hits) > 4:  # it has been seen to be shared
            for _ in range(4):
                served(cache, list(range(fresh, fresh + 100)))
                fresh += 100
    kept = sum(hits[5:]) / len(hits[5:]) / len(shared)
    assert (kept < 0.1) if eviction is Eviction.LRU else (kept > 0.9)


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
    """Each turn uses all that came before; but of a conversation that has ended nothing comes again."""
    cache = PrefixCache(100, 1, eviction=eviction)
    for turn in range(1, 6):
        served(cache, list(range(1, 10 * turn)))
    served(cache, list(range(500, 590)))
    served(cache, list(range(600, 690)))
    assert served(cache, list(range(1, 50))) == 0


def test_costs_that_make_no_sense_change_nothing_absurd() -> None:
    cache = PrefixCache(50, 1, eviction=Eviction.COST)
    for token_s, attention_s in ((0.0, 0.0), (1e-6, 1e9), (1e-4, 1e-8)):
        cache.learn_cost(token_s, attention_s)
        served(cache, list(range(int(attention_s) % 7, 40)))
        assert cache._worth is not None
        assert math.isfinite(cache._worth.depth_cost)
        assert 0 <= cache._worth.depth_cost <= 1
    cache.check_integrity()
