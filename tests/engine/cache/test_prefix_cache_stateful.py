"""Random operations on the cache, each checked against `Model`."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.cache import hash_index, prefix_cache, sequence
from engine.cache.eviction import Eviction
from engine.cache.index import IndexKind
from engine.cache.prefix_cache import PrefixCache
from engine.contract.keys import PrefixKey, prefix_keys
from engine.sched.request import KeySpan
from tests.engine.cache.integrity import check_integrity
from tests.engine.cache.model import Model, User

SETTINGS = settings(
    max_examples=50,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=(Phase.generate, Phase.shrink),
)

PARTS = [(7, 7, 7, 7), (7, 7, 7, 7), (7, 7), (8, 9, 8), (1,), (2,)]
PROMPTS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).map(
    lambda parts: [token for part in parts for token in part]
)
SALTS = st.sampled_from(["", "", "", "tenant"])


def spans_of(salt: str, tokens: list[int], shortfall: int) -> tuple[KeySpan, ...]:
    """Return keys over strides of three tokens. Each covers a little less than its stride, as with real tokenizers."""
    keys = prefix_keys(bytes(tokens), seed=len(salt), stride=3)
    return tuple(KeySpan(key, max(0, 3 * (i + 1) - shortfall)) for i, key in enumerate(keys))


class CacheMachine(RuleBasedStateMachine):
    index = IndexKind.HASH
    keys_are_exact = True

    @initialize(
        blocks=st.integers(4, 16),
        block_size=st.integers(1, 4),
        shortfall=st.integers(0, 2),
        eviction=st.sampled_from(Eviction),
    )
    def start(self, blocks: int, block_size: int, shortfall: int, eviction: Eviction) -> None:
        self.cache = PrefixCache(blocks, block_size, index=self.index, eviction=eviction)
        self.model = Model(self.cache, self.index)
        self.shortfall = shortfall
        self.parents: dict[PrefixKey, PrefixKey] = {}
        self.reported: set[PrefixKey] = set()
        self.most_anchors = 0

    def pick(self, data: st.DataObject) -> User:
        user: User = data.draw(st.sampled_from(self.model.users))
        return user

    @rule(tokens=PROMPTS, salt=SALTS, copies=st.integers(1, 2), reserve=st.integers(0, 2))
    def admit(self, tokens: list[int], salt: str, copies: int, reserve: int) -> None:
        for _ in range(copies):
            self.admit_one(tokens, salt, reserve)

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=5), salt=SALTS, is_last=st.booleans())
    def serve(self, prompts: list[list[int]], salt: str, is_last: bool) -> None:
        """Serve requests from admission to release, one after the other, so that the cache fills and has to evict."""
        for tokens in prompts:
            user = self.admit_one(tokens, salt)
            if user is not None:
                self.compute([user], 1.0, is_last=is_last)
                self.finish_user(user)

    def admit_one(self, tokens: list[int], salt: str, reserve: int = 0) -> User | None:
        spans = spans_of(salt, tokens, self.shortfall)
        self.parents.update((child.key, parent.key) for parent, child in pairwise(spans))
        user = User(salt, list(tokens), spans, self.cache.open(tokens, salt, spans))
        self.most_anchors = max(self.most_anchors, len(user.sequence.anchors))
        assert self.cache.count_hits(user.sequence, len(tokens)) == self.model.expected_tokens(user)
        return user if self.admit_user(user, reserve) else None

    def admit_user(self, user: User, reserve: int) -> bool:
        hits = self.model.expected_hits(user)
        idle_hits = sum(self.model.prefix(user, i) in self.model.idle_since for i in range(hits))
        needed = self.cache.blocks_for(len(user.tokens)) - hits + idle_hits + reserve
        free, available = len(self.cache.pool.free_blocks()), self.cache.pool.available
        cached = self.cache.admit(user.sequence, len(user.tokens), reserve)
        assert (cached is None) == (needed > available)
        if cached is not None:
            source = user.sequence.source
            needed += source is not None and self.model.is_idle(source)
            self.model.admitted(user, cached, free, is_tight=needed == available)
        assert self.cache.pool.available == available - (0 if cached is None else needed - reserve)
        return cached is not None

    def compute(self, batch: list[User], share: float, is_last: bool = False) -> None:
        """Run one step that computes this share of what each request of the batch has left."""
        self.cache.begin_step()
        for user in batch:
            self.model.write(user, user.computed + round((len(user.tokens) - user.computed) * share))
        self.cache.end_step()
        for user in batch:
            self.commit(user, is_last)

    def commit(self, user: User, is_last: bool) -> None:
        self.cache.commit(user.sequence, user.computed, is_last=is_last)
        self.model.committed(user, is_last=is_last)

    @precondition(lambda self: self.model.users)
    @rule(data=st.data(), share=st.floats(0.1, 1), abort=st.booleans(), is_last=st.booleans())
    def step(self, data: st.DataObject, share: float, abort: bool, is_last: bool) -> None:
        """Run a batch of chunks; one of its requests may be aborted meanwhile."""
        batch = data.draw(st.lists(st.sampled_from(self.model.users), min_size=1, unique=True))
        self.cache.begin_step()
        for user in batch:
            left = len(user.tokens) - user.computed
            self.model.write(user, user.computed + round(left * share))
        gone = batch[0] if abort else None
        if gone:
            available = self.cache.pool.available
            self.cache.release(gone.sequence)
            assert self.cache.pool.available == available, "blocks were freed during a step"
        self.cache.end_step()
        if gone:
            self.model.released(gone)
        for user in batch:
            if user is not gone:
                self.commit(user, is_last)

    @precondition(lambda self: self.model.users)
    @rule(data=st.data(), token=st.integers(1, 2))
    def grow(self, data: st.DataObject, token: int) -> None:
        user = self.pick(data)
        user.tokens.append(token)
        self.cache.append(user.sequence, (token,))
        before = list(user.sequence.blocks)
        free, available = len(self.cache.pool.free_blocks()), self.cache.pool.available
        if self.cache.extend(user.sequence, len(user.tokens)):
            self.was_extended(user, before, free)
        else:
            assert available == 0
            assert user.sequence.blocks == before
            self.finish_user(user)

    def was_extended(self, user: User, before: list[int], free: int) -> None:
        assert user.sequence.blocks[: len(before)] == before
        self.model.taken(user.sequence.blocks[len(before) :], free)

    @precondition(lambda self: self.model.users)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.finish_user(self.pick(data))

    @precondition(lambda self: self.model.users)
    @rule(data=st.data(), reserve=st.integers(0, 1))
    def preempt_and_come_back(self, data: st.DataObject, reserve: int) -> None:
        user = self.pick(data)
        self.finish_user(user)
        self.admit_user(user, reserve)

    def finish_user(self, user: User) -> None:
        self.cache.release(user.sequence)
        self.model.released(user)

    @rule(really=st.sampled_from([False] * 7 + [True]))
    def reset(self, really: bool) -> None:
        if really:
            assert self.cache.reset() == self.model.was_reset()

    @rule()
    def report(self) -> None:
        """Check that a reader's set of keys is prefix-closed after each change, and equals the held keys at the end."""
        changes = self.cache.take_changes()
        for key in changes.removed:
            self.reported.remove(key)
            self.check_closed(self.reported)
        for key, _ in changes.stored:
            assert key not in self.reported
            self.reported.add(key)
            self.check_closed(self.reported)
        assert self.reported == set(self.cache.held_keys()[0])

    def check_closed(self, held: set[PrefixKey]) -> None:
        assert all(self.parents[key] in held for key in held if key in self.parents)

    @invariant()
    def agrees_with_model(self) -> None:
        self.model.check()
        held = self.cache.held_keys()[0]
        assert len(held) == len(set(held))
        for i, key in enumerate(held):
            assert key not in self.parents or self.parents[key] in held[:i], "parents come first"
        if self.keys_are_exact:
            assert set(held) == set().union(*self.model.keys_at.values())


class CrowdedMachine(CacheMachine):
    """With room for only two keys in a block, most keys are anchored deeper than usual."""

    keys_are_exact = False

    @invariant()
    def is_bounded(self) -> None:
        most = prefix_cache.MAX_KEYS_PER_BLOCK - 1 + self.most_anchors
        assert all(len(keys) <= most for keys in self.cache._indexed.keys)


@pytest.mark.parametrize("kind", IndexKind)
def test_cache_equals_model(kind: IndexKind) -> None:
    class Machine(CacheMachine):
        index = kind

    run_state_machine_as_test(Machine, settings=SETTINGS)


def test_keys_stay_prefix_closed_when_blocks_take_few_keys() -> None:
    with patch.object(prefix_cache, "MAX_KEYS_PER_BLOCK", 2):
        run_state_machine_as_test(CrowdedMachine, settings=SETTINGS)


@pytest.mark.parametrize("bits", [0, 3])
def test_colliding_hashes_never_serve_wrong_blocks(bits: int) -> None:
    """With a hash of 0 or 3 bits nearly everything collides: hits may be lost, content may not."""

    def weak(parent: bytes, tokens: bytes) -> bytes:
        return bytes([hashlib.sha256(parent + tokens).digest()[0] % 2**bits]) * 32

    class Colliding(CacheMachine):
        keys_are_exact = False

        def admit_one(self, tokens: list[int], salt: str, reserve: int = 0) -> User | None:
            user = User(salt, list(tokens), (), self.cache.open(tokens, salt))
            return user if self.admit_user(user, reserve) else None

        def admit_user(self, user: User, reserve: int) -> bool:
            cached = self.cache.admit(user.sequence, len(user.tokens), reserve)
            if cached is None:
                return False
            user.computed = cached
            self.model.users.append(user)
            for i, block in enumerate(user.sequence.blocks[: cached // self.cache.block_size]):
                assert self.model.content[block] == self.model.prefix(user, i)
            return True

        def was_extended(self, user: User, before: list[int], free: int) -> None:
            pass

        @rule()
        def reset(self) -> None:
            self.cache.reset()

        @invariant()
        def agrees_with_model(self) -> None:
            check_integrity(self.cache)
            self.model.cached.clear()
            in_use = {node for user in self.model.users for node in user.sequence.nodes}
            in_use |= {block for user in self.model.users for block in user.sequence.blocks}
            assert self.cache.pool.available == self.cache.pool.total - len(in_use)

    with patch.object(sequence, "chain_digest", weak), patch.object(hash_index, "chain_digest", weak):
        run_state_machine_as_test(Colliding, settings=SETTINGS)
