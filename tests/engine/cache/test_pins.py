"""Pinned chains, compared with a model that knows for each pin what it covers and until when."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from engine.cache.eviction import Eviction
from engine.cache.index import IndexKind
from engine.cache.prefix_cache import PrefixCache
from engine.cache.sequence import CachedSequence
from tests.engine.cache.integrity import check_integrity

BLOCK = 2
PROMPTS = st.lists(st.sampled_from([1, 1, 2]), min_size=2, max_size=14)
Chain = tuple[int, ...]


def serve(cache: PrefixCache, tokens: list[int], salt: str = "") -> CachedSequence | None:
    """Compute a request and return its sequence, not yet released."""
    sequence = cache.open(tokens, salt)
    if cache.admit(sequence, len(tokens)) is None:
        return None
    cache.commit(sequence, len(tokens))
    return sequence


def hits(cache: PrefixCache, tokens: list[int], salt: str = "") -> int:
    """Return how many whole blocks of the prompt are cached."""
    return len(cache.find(cache.open(tokens, salt), len(tokens) // BLOCK))


SALTS = ("", "other", "third")


class PinMachine(RuleBasedStateMachine):
    index = IndexKind.HASH

    @initialize(blocks=st.integers(8, 40), share=st.sampled_from([0.0, 0.3, 0.5]), eviction=st.sampled_from(Eviction))
    def start(self, blocks: int, share: float, eviction: Eviction) -> None:
        self.most = int(blocks * share)
        self.cache = PrefixCache(
            blocks, BLOCK, index=self.index, eviction=eviction, pinned_blocks=self.most, learnt_blocks=blocks // 4
        )
        self.now_s = 0.0
        self.pinned = 0
        self.promised: dict[tuple[str, Chain], list[float]] = {}
        """Salt and tokens of a pinned chain -> when the pin ends, and how long each use renews it for."""

    @rule(
        tokens=PROMPTS,
        salt=st.sampled_from(SALTS),
        blocks=st.integers(0, 7),
        lifetime_s=st.sampled_from([5.0, 50.0]),
    )
    def pin(self, tokens: list[int], salt: str, blocks: int, lifetime_s: float) -> None:
        sequence = self.use(tokens, salt)
        if sequence is None:
            return
        self.pinned += 1
        lifetime_s += self.pinned / 2**20  # no two pins end at the same time, so their order is known
        wanted = min(blocks, len(tokens) // BLOCK)
        before = {other: self.held(other) for other in SALTS}
        kept = self.cache.keep(sequence, blocks, lifetime_s)
        self.level(salt, tokens[: wanted * BLOCK])
        first = self.covered_of(salt, tokens[: wanted * BLOCK])
        assert kept == min(wanted, first + self.most - sum(map(self.held, SALTS)))
        self.cache.release(sequence)
        if kept:
            self.promise((salt, tuple(tokens[: kept * BLOCK])), self.now_s + lifetime_s, lifetime_s)
        others = [other for other in SALTS if other != salt]
        for other in others:
            assert self.held(other) in (before[other], *range(self.held(salt), before[other])), (
                "a salt only loses blocks that it has more than the asking salt"
            )
        if kept < wanted:
            assert max(map(self.held, others)) <= self.held(salt) + 1, "a salt is refused only if it has its fair share"

    def promise(self, chain: tuple[str, Chain], until_s: float, lifetime_s: float) -> None:
        held = self.promised.setdefault(chain, [0.0, 0.0])
        held[0], held[1] = max(held[0], until_s), max(held[1], lifetime_s)

    def held(self, salt: str) -> int:
        return sum(other == salt for other, _ in self.covered())

    def covered(self) -> set[tuple[str, Chain]]:
        return {(salt, kept[:end]) for salt, kept in self.promised for end in range(BLOCK, len(kept) + 1, BLOCK)}

    def covered_of(self, salt: str, tokens: list[int]) -> int:
        covered = self.covered()
        return sum((salt, tuple(tokens[:end])) in covered for end in range(BLOCK, len(tokens) + 1, BLOCK))

    def level(self, salt: str, tokens: list[int]) -> None:
        """Cut the other salts to one height, a number of blocks: the lowest one that frees at most as many blocks as
        are missing, and that is at least the number of blocks that `salt` then has.

        If blocks are still missing, each salt at that height loses one more block if it has at least two more than
        `salt`.
        """
        others = {other: self.held(other) for other in SALTS if other != salt}
        free = self.most - sum(map(self.held, SALTS))
        missing = len(tokens) // BLOCK - self.covered_of(salt, tokens) - free
        if missing <= 0:
            return
        for height in range(max(others.values()) + 1):
            cuts = {other: max(0, held - height) for other, held in others.items()}
            total = sum(cuts.values())
            if total <= missing and self.held(salt) + free + total <= height:
                mine = self.held(salt) + free + total
                for other, cut in cuts.items():
                    goal = others[other] - cut
                    if goal == height and total < missing and mine + 1 < height:  # `other` has two more than `salt`
                        goal, total, mine = goal - 1, total + 1, mine + 1
                    self.cut(other, goal)
                return

    def cut(self, salt: str, goal: int) -> None:
        """Cut chains from their ends, those that expire soonest first. Blocks that another chain covers are kept."""
        while self.held(salt) > goal:
            for chain in sorted([c for c in self.promised if c[0] == salt], key=lambda c: self.promised[c][0]):
                if self.held(salt) <= goal or chain not in self.promised:
                    continue
                until_s, lifetime_s = self.promised.pop(chain)
                kept, covered = chain[1], self.covered()
                left = len(covered | {(salt, kept[:end]) for end in range(BLOCK, len(kept) + 1, BLOCK)})
                left -= len(covered) - self.held(salt) + goal
                while kept and left and (salt, kept) not in covered:
                    kept, left = kept[:-BLOCK], left - 1
                if kept:
                    self.promise((salt, kept), until_s, lifetime_s)

    @rule(tokens=PROMPTS, salt=st.sampled_from(SALTS))
    def serve(self, tokens: list[int], salt: str) -> None:
        sequence = self.use(tokens, salt)
        if sequence is not None:
            self.cache.release(sequence)

    @rule(tokens=PROMPTS, salt=st.sampled_from(SALTS), lifetime_s=st.sampled_from([5.0, 50.0]))
    def pin_unasked(self, tokens: list[int], salt: str, lifetime_s: float) -> None:
        """Pin without being asked. These pins have separate room: the invariant checks that asked pins keep theirs."""
        sequence = self.use(tokens, salt)
        if sequence is not None:
            self.cache.keep(sequence, 7, lifetime_s, is_asked=False)
            assert len(self.cache.learnt) <= self.cache.pool.total // 4
            self.cache.release(sequence)

    @rule(blocks=st.integers(1, 8))
    def give_up_unasked(self, blocks: int) -> None:
        available, exclusive = self.cache.pool.available, len(set(self.cache.learnt) - set(self.cache.pins))
        assert self.cache.learnt.give_up(blocks) == min(blocks, exclusive)
        assert self.cache.pool.available == available + min(blocks, exclusive)

    def use(self, tokens: list[int], salt: str) -> CachedSequence | None:
        """Serve a request, and renew the pins of the blocks that it reuses. It never reuses its last token."""
        reused = min(hits(self.cache, tokens, salt), (len(tokens) - 1) // BLOCK) * BLOCK
        lacks = self.cache.lacks(self.cache.open(tokens, salt), len(tokens))
        sequence = serve(self.cache, tokens, salt)
        assert (sequence is None) == (lacks > 0)
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
        check_integrity(self.cache)
        assert len(self.cache.pins) == len(self.covered()) <= self.most
        for salt in SALTS:
            assert self.cache.pins.blocks_of(salt.encode()) == self.held(salt)
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
    """Serve new prompts that take every block of the pool."""
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
    check_integrity(cache)


def test_tenants_share_what_may_be_pinned_and_one_alone_has_it_all() -> None:
    cache = cache_of(64, 12)

    def pin(token: int, salt: str, lifetime_s: float = 10.0) -> int:
        sequence = serve(cache, [token] * 24, salt)
        assert sequence is not None
        kept = cache.keep(sequence, 12, lifetime_s)
        cache.release(sequence)
        return kept

    def held() -> list[int]:
        return [cache.pins.blocks_of(salt) for salt in (b"a", b"b", b"c")]

    assert (pin(1, "a"), held()) == (12, [12, 0, 0])
    assert (pin(2, "b"), held()) == (6, [6, 6, 0])
    assert (pin(3, "c"), held()) == (4, [4, 4, 4])
    assert (pin(1, "a"), held()) == (4, [4, 4, 4])  # a salt with its fair share takes no other salt's blocks
    assert (pin(4, "a"), held()) == (0, [4, 4, 4])
    check_integrity(cache)


def test_what_is_missing_is_taken_from_single_tenants_if_a_cut_of_all_is_too_much() -> None:
    cache = cache_of(64, 13)
    for token, salt, blocks, kept in ((1, "a", 6, 6), (2, "b", 6, 6), (3, "c", 2, 2)):
        sequence = serve(cache, [token] * 12, salt)
        assert sequence is not None
        assert cache.keep(sequence, blocks, 10.0) == kept
        cache.release(sequence)
    assert [cache.pins.blocks_of(salt) for salt in (b"a", b"b", b"c")] == [5, 6, 2]
    check_integrity(cache)


def test_a_pin_is_cut_from_its_end_and_the_soonest_to_expire_first() -> None:
    cache = cache_of(64, 12)
    for token, lifetime_s in ((1, 30.0), (2, 10.0), (3, 20.0)):
        sequence = serve(cache, [token] * 8, "a")
        assert sequence is not None
        assert cache.keep(sequence, 4, lifetime_s) == 4
        cache.release(sequence)
    other = serve(cache, [4] * 10, "b")
    assert other is not None
    assert cache.keep(other, 5, 10.0) == 5
    cache.release(other)
    for token in range(20, 40):
        flooding = serve(cache, [token] * 16)
        assert flooding is not None
        cache.release(flooding)
    assert [hits(cache, [token] * 8, "a") for token in (1, 2, 3)] == [4, 0, 3]
    check_integrity(cache)


def test_if_blocks_are_needed_pins_that_expire_soonest_are_shortened_first() -> None:
    cache = cache_of(32, 16)
    for token, lifetime_s in ((1, 30.0), (2, 10.0), (3, 20.0)):
        sequence = serve(cache, [token] * 8)
        assert sequence is not None
        assert cache.keep(sequence, 4, lifetime_s) == 4
        cache.release(sequence)
    assert cache.pins.give_up(5) == 5
    assert len(cache.pins) == 7
    flood(cache, 0)
    assert [hits(cache, [token] * 8) for token in (1, 2, 3)] == [4, 0, 3]
    assert cache.pins.give_up(100) == 7
    assert cache_of(4, 0).pins.give_up(1) == 0


def test_what_a_request_uses_is_not_given_up() -> None:
    cache = cache_of(32, 16)
    sequence = serve(cache, [1] * 8)
    assert sequence is not None
    cache.keep(sequence, 4, 10.0)
    assert cache.pins.give_up(2) == 0
    assert len(cache.pins) == 4
    cache.release(sequence)
    assert cache.pins.give_up(2) == 2


@pytest.mark.parametrize("needed", range(1, 10))
def test_a_pin_keeps_what_would_not_become_available_without_it(needed: int) -> None:
    """A request uses the first half of a pinned chain, so only the second half can be given up."""
    cache = cache_of(32, 16)
    pinned = serve(cache, [1] * 8 + [2] * 8)
    assert pinned is not None
    assert cache.keep(pinned, 8, 10.0) == 8
    cache.release(pinned)
    other = serve(cache, [1] * 8 + [3] * 2)
    assert other is not None
    assert cache.pins.give_up(needed) == min(needed, 4)
    assert len(cache.pins) == 8 - min(needed, 4)
    check_integrity(cache)
    cache.release(other)
    flood(cache, 0)
    assert hits(cache, [1] * 8 + [2] * 8) == 8 - min(needed, 4)


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


@pytest.mark.parametrize("lifetimes_s", [(5.0, 50.0), (50.0, 5.0)])
def test_a_chain_that_is_pinned_twice_has_the_longer_time_from_then_and_from_each_use_on(
    lifetimes_s: tuple[float, float],
) -> None:
    cache = cache_of(16, 8)
    sequence = serve(cache, [1] * 9)
    assert sequence is not None
    for lifetime_s in lifetimes_s:
        cache.keep(sequence, 4, lifetime_s)
    cache.release(sequence)
    cache.advance(40.0)
    again = serve(cache, [1] * 9)
    assert again is not None
    cache.release(again)
    for now_s, pinned in ((89.0, 4), (90.0, 0)):
        cache.advance(now_s)
        assert len(cache.pins) == pinned


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


def test_pins_that_are_given_up_leave_nothing_behind() -> None:
    """Their time is far from over when they go."""
    cache = cache_of(64, 32)
    for i in range(400):
        sequence = serve(cache, [i % 7] * 8)
        assert sequence is not None
        cache.keep(sequence, 4, 3600.0)
        cache.release(sequence)
        assert cache.pins.give_up(4) == 4
    assert len(cache.pins) == 0
    assert len(cache.pins._due) <= 64
