"""Pinned chains: against a model that knows for each pin what it covers and until when."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from engine.cache.eviction import Eviction
from engine.cache.index import IndexKind
from engine.cache.prefix_cache import PrefixCache
from engine.cache.sequence import CachedSequence

BLOCK = 2
PROMPTS = st.lists(st.sampled_from([1, 1, 2]), min_size=2, max_size=14)
Chain = tuple[int, ...]


def serve(cache: PrefixCache, tokens: list[int], salt: str = "") -> CachedSequence | None:
    """A request that is computed, and still there."""
    sequence = cache.open(tokens, salt)
    if cache.admit(sequence, len(tokens)) is None:
        return None
    cache.commit(sequence, len(tokens))
    return sequence


def hits(cache: PrefixCache, tokens: list[int], salt: str = "") -> int:
    """Whole blocks of the prompt that are there."""
    return len(cache.find(cache.open(tokens, salt), len(tokens) // BLOCK))


class PinMachine(RuleBasedStateMachine):
    index = IndexKind.HASH

    @initialize(blocks=st.integers(8, 24), share=st.sampled_from([0.0, 0.3, 0.5]), eviction=st.sampled_from(Eviction))
    def start(self, blocks: int, share: float, eviction: Eviction) -> None:
        self.most = int(blocks * share)
        self.cache = PrefixCache(blocks, BLOCK, index=self.index, eviction=eviction, pinned_blocks=self.most)
        self.now_s = 0.0
        self.promised: dict[tuple[str, Chain], list[float]] = {}
        """Salt and tokens of what was pinned -> until when, and for how long from each use on."""

    @rule(
        tokens=PROMPTS,
        salt=st.sampled_from(["", "other"]),
        blocks=st.integers(0, 7),
        lifetime_s=st.sampled_from([5.0, 50.0]),
    )
    def pin(self, tokens: list[int], salt: str, blocks: int, lifetime_s: float) -> None:
        sequence = self.use(tokens, salt)
        if sequence is None:
            return
        kept = self.cache.keep(sequence, blocks, lifetime_s)
        assert kept <= min(blocks, len(tokens) // BLOCK)
        if self.most >= 2 * len(tokens) and not len(self.promised):
            assert kept == min(blocks, len(tokens) // BLOCK)
        self.cache.release(sequence)
        if kept:
            held = self.promised.setdefault((salt, tuple(tokens[: kept * BLOCK])), [0.0, 0.0])
            held[0], held[1] = max(held[0], self.now_s + lifetime_s), max(held[1], lifetime_s)

    @rule(tokens=PROMPTS, salt=st.sampled_from(["", "other"]))
    def serve(self, tokens: list[int], salt: str) -> None:
        sequence = self.use(tokens, salt)
        if sequence is not None:
            self.cache.release(sequence)

    def use(self, tokens: list[int], salt: str) -> CachedSequence | None:
        """What a request reuses is renewed: all but its last token may be."""
        reused = min(hits(self.cache, tokens, salt), (len(tokens) - 1) // BLOCK) * BLOCK
        sequence = serve(self.cache, tokens, salt)
        if sequence is not None:
            for (other, kept), held in self.promised.items():
                if other == salt and len(kept) <= reused and tuple(tokens[: len(kept)]) == kept:
                    held[0] = max(held[0], self.now_s + held[1])
        return sequence

    @rule(later_s=st.sampled_from([1.0, 7.0, 60.0]))
    def wait(self, later_s: float) -> None:
        self.now_s += later_s
        self.cache.advance(self.now_s)
        self.promised = {key: held for key, held in self.promised.items() if held[0] > self.now_s}

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.promised.clear()

    @invariant()
    def what_is_promised_is_there(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        covered = {(salt, kept[:end]) for salt, kept in self.promised for end in range(BLOCK, len(kept) + 1, BLOCK)}
        assert len(self.cache.pins) == len(covered) <= self.most
        for salt, kept in self.promised:
            assert hits(self.cache, list(kept), salt) == len(kept) // BLOCK


class RadixPinMachine(PinMachine):
    index = IndexKind.RADIX


@pytest.mark.parametrize("machine", [PinMachine, RadixPinMachine])
def test_what_is_pinned_stays_until_its_time_and_no_longer(machine: type[PinMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            phases=(Phase.generate, Phase.shrink),
        ),
    )


def cache_of(blocks: int, pinned: int) -> PrefixCache:
    return PrefixCache(blocks, BLOCK, pinned_blocks=pinned)


def flood(cache: PrefixCache, first: int) -> None:
    """Prompts of their own that take every block there is."""
    for i in range(first, first + 20):
        sequence = serve(cache, [100 + i] * 8)
        assert sequence is not None
        cache.release(sequence)


def test_a_pin_outlives_a_flood_and_its_share_bounds_it() -> None:
    cache = cache_of(16, 4)
    long = serve(cache, list(range(12)))
    assert long is not None
    assert cache.keep(long, 6, 10.0) == 4
    assert cache.keep(long, 2, 10.0) == 2
    cache.release(long)
    flood(cache, 0)
    assert hits(cache, list(range(12))) == 4
    cache.advance(10.0)
    assert len(cache.pins) == 0
    flood(cache, 20)
    assert hits(cache, list(range(12))) == 0
    cache.check_integrity()


def test_what_nobody_asked_for_yields_to_what_was_asked_for() -> None:
    cache = cache_of(32, 8)
    learnt, asked = serve(cache, [1] * 12), serve(cache, [2] * 16)
    assert learnt is not None
    assert asked is not None
    assert cache.keep(learnt, 6, 10.0, is_asked=False) == 4
    assert cache.keep(asked, 8, 10.0) == 8
    assert cache.pins.given_up == 1
    assert cache.keep(learnt, 6, 10.0, is_asked=False) == 0
    cache.check_integrity()


def test_pins_end_the_soonest_first_where_blocks_are_needed() -> None:
    cache = cache_of(32, 16)
    for token, lifetime_s in ((1, 30.0), (2, 10.0), (3, 20.0)):
        sequence = serve(cache, [token] * 8)
        assert sequence is not None
        assert cache.keep(sequence, 4, lifetime_s) == 4
        cache.release(sequence)
    assert cache.pins.give_up(5)
    assert len(cache.pins) == 4
    flood(cache, 0)
    assert [hits(cache, [token] * 8) for token in (1, 2, 3)] == [4, 0, 0]
    assert not cache_of(4, 0).pins.give_up(1)


@pytest.mark.parametrize("uses", [0, 3])
def test_a_use_renews_a_pin(uses: int) -> None:
    cache = cache_of(16, 8)
    sequence = serve(cache, [1] * 9)
    assert sequence is not None
    cache.keep(sequence, 4, 10.0)
    cache.release(sequence)
    for use in range(uses):
        cache.advance(9.0 * (use + 1))
        again = serve(cache, [1] * 9)
        assert again is not None
        cache.release(again)
    cache.advance(9.0 * uses + 9.0)
    assert len(cache.pins) == 4
    cache.advance(9.0 * uses + 10.0)
    assert len(cache.pins) == 0


def test_many_renewals_leave_nothing_behind() -> None:
    cache = cache_of(64, 32)
    for i in range(400):
        sequence = serve(cache, [i % 7] * 8)
        assert sequence is not None
        cache.keep(sequence, 4, 5.0)
        cache.release(sequence)
        cache.advance(i)
        if i % 50 == 49:
            cache.reset()
    cache.advance(1000)
    assert len(cache.pins) == 0
    assert len(cache.pins._due) == 0
