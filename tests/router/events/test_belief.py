"""The index believes that a pod holds what its model engine holds, whatever was sent to the engine."""

from __future__ import annotations

import itertools
from typing import Any

import msgpack
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.contract.keys import PrefixKey
from router.events.feed import MAX_SESSION_KEYS, EventFeed
from router.events.mapping import MAX_BLOCK_KEYS
from router.registry.index import PrefixIndex
from router.views.types import PodId
from tests.router.events.model_engine import MODEL, STRIDE, ModelEngine, keys_of, uneven_tokens, uniform_tokens

POD = PodId("pod")
BLOCK = 2
PIECES = st.integers(0, 5)
ALPHABET = bytes(range(65, 90))


def piece(number: int, length: int) -> bytes:
    """Return a text of `length` bytes that differs for each `number`."""
    step = 1 + number * 3
    return bytes(ALPHABET[(number + at * step) % (7 + 3 * number)] for at in range(length))


class Belief(RuleBasedStateMachine):
    """Sends requests to one pod. Their prompts are made of pieces, some of which several prompts share."""

    tokenizer = staticmethod(uneven_tokens)
    is_exact = is_told = False

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.index = PrefixIndex()
        self.feed = EventFeed(self.index, stride=STRIDE, belief_ttl_s=600.0, clock=lambda: self.now_s)
        self.feed.follow(POD, MODEL)
        self.feed.flows(POD, is_flowing=True)
        self.engine = ModelEngine(room=40, block_tokens=BLOCK)
        self.read = 0
        self.sessions = itertools.count()
        self.prompts: dict[bytes, bool] = {}
        """Prompt -> whether the engine ever stored a block for it. If a stranger's request stored all its blocks, no
        event names the prompt."""

    def catch_up(self) -> None:
        """Deliver the events that the engine has published since the last call."""
        for payload in self.engine.batches[self.read :]:
            self.feed.batch(POD, payload)
        self.read = len(self.engine.batches)

    @rule(
        pieces=st.lists(st.tuples(PIECES, st.integers(1, 70)), min_size=1, max_size=4),
        says=st.booleans(),
        generated=st.integers(0, 9),
        guess=st.floats(0.6, 1.6),
    )
    def request(self, pieces: list[tuple[int, int]], says: bool, generated: int, guess: float) -> None:
        """Send a request, let the engine store its blocks, and answer with or without a token count (`says`)."""
        text = b"".join(piece(number, length) for number, length in pieces)
        session = f"s{next(self.sessions)}"
        tokens = [token for token, _ in self.tokenizer(text)]
        told = says or self.is_told
        self.feed.on_routed(POD, session, keys_of(text), len(tokens) * guess, self.now_s, prompt_bytes=len(text))
        self.engine.serve(tokens, session, generated=[-1 - at for at in range(generated)])
        self.catch_up()
        self.feed.on_answered(POD, session, len(tokens) if told else None)
        stores = [event for event in msgpack.unpackb(self.engine.batches[-1])[1] if event["type"] == "BlockStored"]
        self.prompts[text] = self.prompts.get(text, False) or bool(stores)

    @rule(number=PIECES, length=st.integers(1, 150))
    def stranger(self, number: int, length: int) -> None:
        """Serve a request that did not come from this gateway."""
        self.engine.serve([token for token, _ in self.tokenizer(piece(number, length))], None)
        self.catch_up()

    @rule()
    def clear(self) -> None:
        """Empty the cache."""
        self.engine.clear()
        self.catch_up()

    @invariant()
    def is_prefix_closed_and_right(self) -> None:
        """If the engine holds a whole prompt and published it, all keys are believed; if it holds no block, none is."""
        believed = set().union(*self.index.held(POD).values())
        for text, is_known in self.prompts.items():
            keys, tokens = keys_of(text), self.tokenizer(text)
            mine = [key in believed for key in keys]
            if self.is_told:
                assert mine == sorted(mine, reverse=True), "the believed keys are not a prefix of the chain"
            blocks = self.engine.held_blocks([token for token, _ in tokens])
            if not blocks:
                assert not any(mine)
            if not is_known:
                continue
            if self.is_told and blocks == len(tokens) // BLOCK:
                assert all(mine)
            if self.is_exact:
                covered = (sum(end <= STRIDE * (i + 1) for _, end in tokens) // BLOCK for i in range(len(keys)))
                assert mine == [max(1, needed) <= blocks for needed in covered]


class ExactBelief(Belief):
    """If tokens have equal length and engines count them, every key is right."""

    tokenizer = staticmethod(uniform_tokens)
    is_exact = is_told = True


class ToldBelief(Belief):
    """If engines count tokens, a prompt that is held whole is believed whole, whatever prompts share a part of it."""

    is_told = True


def test_of_prompts_that_differ_after_their_last_whole_block_the_keys_are_bounded() -> None:
    """A common beginning stays in the cache, and the last key of each question after it stands for the same block."""
    belief = Belief()
    strides, block_tokens = 10, 64
    stored = {"type": "BlockStored", "lora_id": None, "block_size": block_tokens}
    common = {**stored, "block_hashes": [1, 2], "parent_block_hash": None, "token_ids": list(range(2 * block_tokens))}
    shared = tuple(map(PrefixKey, range(strides)))
    for number in range(2 * MAX_BLOCK_KEYS):
        session, last = f"s{number}", PrefixKey(1_000 + number)
        size = (strides + 1.5) * STRIDE
        belief.feed.on_routed(POD, session, (*shared, last), 2.5 * block_tokens, 0.0, prompt_bytes=int(size))
        own = {**stored, "block_hashes": [10 + number], "parent_block_hash": 2, "token_ids": [number] * block_tokens}
        events = [{**event, "session_id": session} for event in ([common] if not number else []) + [own]]
        belief.feed.batch(POD, msgpack.packb([0.0, events, None]))
        belief.feed.on_answered(POD, session, int(2.5 * block_tokens))
        believed = set().union(*belief.index.held(POD).values())
        assert believed.issuperset((*shared, last))
        assert len(believed) <= strides + MAX_BLOCK_KEYS


def test_of_requests_that_wait_for_their_blocks_the_keys_are_bounded() -> None:
    belief = Belief()
    texts = {"first": piece(1, 60), "last": piece(2, 60)}
    tokens = {session: [token for token, _ in uniform_tokens(text)] for session, text in texts.items()}

    def route(session: str) -> None:
        belief.feed.on_routed(POD, session, keys_of(texts[session]), len(tokens[session]), 0.0, prompt_bytes=60)

    route("first")
    long = tuple(map(PrefixKey, range(2**16)))
    for number in range(MAX_SESSION_KEYS // len(long)):
        belief.feed.on_routed(POD, f"long {number}", long, 1.0, 0.0)
    route("last")
    for session in texts:
        belief.engine.serve(tokens[session], session)
        belief.catch_up()
        belief.feed.on_answered(POD, session, len(tokens[session]))
    believed = set().union(*belief.index.held(POD).values())
    assert believed == set(keys_of(texts["last"]))


TestBelief = Belief.TestCase
TestBelief.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)
TestExactBelief = ExactBelief.TestCase
TestExactBelief.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)
TestToldBelief = ToldBelief.TestCase
TestToldBelief.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", ["mamba", "full_attention"])
def test_groups_of_other_block_sizes_do_not_end_what_is_known(first: int, kind: str) -> None:
    """A hybrid model's groups of layers may have blocks of different sizes, and their events alternate."""
    belief = Belief()
    for number in range(4):
        session = f"s{number}"
        keys = tuple(map(PrefixKey, range(10 * number, 10 * number + 2)))
        belief.feed.on_routed(POD, session, keys, 16, 0.0, prompt_bytes=2 * STRIDE)
        stored = {"type": "BlockStored", "parent_block_hash": None, "session_id": session}
        tokens = list(range(100 * number, 100 * number + 16))
        groups: list[dict[str, Any]] = [
            {**stored, "group_idx": 0, "kv_cache_spec_kind": "full_attention", "block_size": 4, "token_ids": tokens},
            {**stored, "group_idx": 1, "kv_cache_spec_kind": kind, "block_size": 8, "token_ids": tokens},
        ]
        for event in groups:
            count = 16 // event["block_size"]
            event["block_hashes"] = [10**6 * event["group_idx"] + 100 * number + at for at in range(count)]
        order = groups if not first or number else groups[::-1]
        belief.feed.batch(POD, msgpack.packb([0.0, order, None]))
        belief.feed.on_answered(POD, session, 16)
        believed = set().union(*belief.index.held(POD).values())
        assert len(believed) == 2 * (number + 1)


@pytest.mark.parametrize("size", [4, 8])
def test_what_another_group_drops_is_not_gone(size: int) -> None:
    """vLLM names blocks of several groups alike if their tokens are. A sliding window drops its blocks early."""
    belief = Belief()
    belief.feed.on_routed(POD, "s", (PrefixKey(1), PrefixKey(2)), 16, 0.0, prompt_bytes=2 * STRIDE)
    stored = {"type": "BlockStored", "parent_block_hash": None, "session_id": "s", "token_ids": list(range(16))}
    for group, kind, tokens in ((1, "sliding_window", size), (0, "full_attention", 4)):
        names = list(range(16 // tokens))
        event = {"group_idx": group, "kv_cache_spec_kind": kind, "block_size": tokens, "block_hashes": names}
        belief.feed.batch(POD, msgpack.packb([0.0, [{**stored, **event}], None]))
    belief.feed.on_answered(POD, "s", 16)
    removed = {"type": "BlockRemoved", "block_hashes": [0, 1], "medium": "GPU"}
    for group, left in ((1, 2), (0, 0)):
        belief.feed.batch(POD, msgpack.packb([0.0, [{**removed, "group_idx": group}], None]))
        assert len(set().union(*belief.index.held(POD).values())) == left


def test_a_request_of_an_engines_last_life_enters_nothing_for_the_next() -> None:
    """The engine is started anew with another block size, and the answer to an earlier request ends after that."""
    belief = Belief()
    belief.feed.on_routed(POD, "s", (PrefixKey(1), PrefixKey(2)), 16, 0.0, prompt_bytes=2 * STRIDE)
    for life, size in ((1, 4), (2, 8)):
        belief.feed.leave(POD)
        belief.feed.follow(POD, MODEL)
        belief.feed.flows(POD, is_flowing=True)
        names, tokens = [10 * life + at for at in range(16 // size)], list(range(100 * life, 100 * life + 16))
        stored = {"type": "BlockStored", "parent_block_hash": None, "block_hashes": names, "token_ids": tokens}
        session = {"session_id": "s" if life == 1 else "another"}
        belief.feed.batch(POD, msgpack.packb([0.0, [{**stored, **session, "block_size": size}], None]))
        assert any(belief.index.held(POD).values()) is (life == 1)
    belief.feed.on_answered(POD, "s", 16)
    assert not any(belief.index.held(POD).values())
