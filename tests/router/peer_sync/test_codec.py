"""Gateways' messages survive encoding and decoding. Peer bytes are refused."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.events import GATEWAY_VERSION, DecodeError, Head, MessageKind, UnknownVersion, pack_head, pack_keys
from engine.contract.keys import PrefixKey, prefix_keys
from router.peer_sync import codec
from router.peer_sync.codec import decode, encode, encode_assumed
from router.peer_sync.messages import (
    Ask,
    Assumed,
    Began,
    Ended,
    Forgotten,
    InFlight,
    Life,
    PeerMessage,
    Refuted,
    Routed,
    Undone,
)
from router.views.types import PodId

AGES = st.floats(0, 3000, width=32)
NUMBERS = st.integers(0, 2**32 - 1)
PODS = st.text(min_size=1, max_size=30).map(PodId)
TOKENS = st.integers(0, 2**30)
SESSIONS = st.one_of(st.text(max_size=60), st.text("0123456789abcdef", min_size=32, max_size=32))
CHAINS = st.text("ab", max_size=40).map(lambda text: prefix_keys(text.encode(), 7, 2))
EVENTS: Any = st.one_of(
    st.builds(Routed, AGES, NUMBERS, PODS, CHAINS, TOKENS, TOKENS, TOKENS, SESSIONS),
    st.builds(InFlight, AGES, NUMBERS, PODS, TOKENS, TOKENS, TOKENS, st.booleans()),
    st.builds(Began, AGES, NUMBERS, st.none() | TOKENS),
    st.builds(Ended, AGES, NUMBERS),
    st.builds(Undone, AGES, PODS, CHAINS),
    st.builds(Refuted, AGES, PODS, CHAINS, NUMBERS, TOKENS),
    st.builds(Forgotten, AGES, PODS, st.booleans()),
    st.builds(Ask, AGES, st.integers(0, 2**64 - 1).map(Life)),
)
MESSAGES = st.builds(
    PeerMessage,
    st.integers(1, 2**64 - 1).map(Life),
    st.text(max_size=40),
    st.integers(1, 2**64 - 1),
    st.integers(1, 65536),
    st.lists(EVENTS, max_size=12).map(tuple),
    st.booleans(),
    st.booleans(),
    st.floats(0, codec.MAX_AT_S),
)


LIVES = st.integers(1, 2**64 - 1).map(Life)
RUNS = st.lists(st.tuples(st.floats(0, 1e6), CHAINS.filter(bool)), max_size=6)
ASSUMED = st.builds(
    lambda life, seq, stride, pod, written_s, runs: Assumed(
        life, seq, stride, pod, written_s, [(written_s - age_s, keys) for age_s, keys in runs]
    ),
    LIVES,
    st.integers(0, 2**64 - 1),
    st.integers(1, 65536),
    PODS,
    st.floats(1e9, codec.MAX_AT_S),
    RUNS,
)


@given(message=MESSAGES)
def test_what_is_read_is_what_was_written(message: PeerMessage) -> None:
    assert decode(encode(message)) == message


@given(assumed=ASSUMED)
def test_what_is_assumed_is_read_as_it_was_written(assumed: Assumed) -> None:
    read = decode(encode_assumed(assumed))
    assert isinstance(read, Assumed)
    assert read._replace(runs=()) == assumed._replace(runs=())
    for (at_s, keys), (wanted_s, wanted) in zip(read.runs, assumed.runs, strict=True):
        assert keys == wanted
        assert at_s == pytest.approx(wanted_s, abs=1e-3)


@given(message=MESSAGES | ASSUMED, at=st.integers(0, 4000), byte=st.integers(0, 255), cut=st.integers(0, 60))
@settings(max_examples=150)
def test_changed_bytes_are_refused_or_are_a_message_within_the_bounds(
    message: PeerMessage | Assumed, at: int, byte: int, cut: int
) -> None:
    data = bytearray(encoded(message))
    data[at % len(data)] = byte
    try:
        read = decode(bytes(data[: len(data) - cut]))
    except DecodeError:
        return
    if isinstance(read, Assumed):
        assert sum(len(keys) for _, keys in read.runs) <= codec.MAX_KEYS
        return
    for event in read.events:
        assert 0 <= event.age_s <= codec.MAX_AGE_S
        if isinstance(event, Routed | InFlight):
            assert max(event.prompt_tokens, event.uncached_tokens) <= codec.MAX_TOKENS


@given(data=st.binary(max_size=300), kind=st.sampled_from((MessageKind.SENT, MessageKind.ASSUMED)))
def test_no_bytes_raise_anything_else(data: bytes, kind: MessageKind) -> None:
    with contextlib.suppress(DecodeError):
        decode(data)
    with contextlib.suppress(DecodeError):
        decode(head(kind) + data)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@given(
    body=st.lists(VALUES, min_size=3, max_size=8)
    | st.tuples(
        st.just(0.0),
        st.just(""),
        st.just(0),
        st.lists(st.text(max_size=3)),
        st.binary(),
        st.binary(),
        st.binary(),
        st.lists(VALUES),
    ),
    kind=st.sampled_from((MessageKind.SENT, MessageKind.ASSUMED)),
)
def test_no_values_in_the_wrong_place_raise_anything_else(body: Any, kind: MessageKind) -> None:
    with contextlib.suppress(DecodeError):
        decode(head(kind) + msgpack.packb(body))


def encoded(message: PeerMessage | Assumed) -> bytes:
    return encode_assumed(message) if isinstance(message, Assumed) else encode(message)


def head(kind: MessageKind = MessageKind.SENT) -> bytes:
    return pack_head(GATEWAY_VERSION, Head(kind, 256, 1, 1))


def sent(data: bytes) -> PeerMessage:
    message = decode(data)
    assert isinstance(message, PeerMessage)
    return message


def routed(*chains: tuple[PrefixKey, ...]) -> bytes:
    events = tuple(Routed(0.0, i, PodId("pod"), keys, 100, 50, 10, "0" * 32) for i, keys in enumerate(chains))
    return encode(PeerMessage(Life(1), "", 1, 256, events))


def test_a_system_prompt_that_requests_share_is_told_once() -> None:
    prompt = bytes(range(256)) * 20
    chains = [prefix_keys(prompt + bytes([i]) * 512, 1) for i in range(10)]
    alone = len(routed(chains[0]))
    assert len(routed(*chains)) < alone + 9 * 100
    assert [event.keys for event in sent(routed(*chains)).events if isinstance(event, Routed)] == chains


def test_another_version_is_told_apart_from_nonsense() -> None:
    data = bytearray(routed(()))
    data[0] = GATEWAY_VERSION + 1
    with pytest.raises(UnknownVersion, match="upgrade"):
        decode(bytes(data))


def test_few_bytes_cannot_ask_for_much_memory() -> None:
    """Many chains that all begin with one long chain are counted before memory for them is allocated."""
    keys = tuple(PrefixKey(i) for i in range(60_000))
    chains, events = 200, 200
    heads = struct.pack("<III", 0, 0, len(keys)) + struct.pack("<III", 1, len(keys), 0) * (chains - 1)
    packed = codec._EVENT.pack(5, 0, 0, 0.0, 0, 1, 0, 0, 0) * events
    body: Any = (0.0, "", 0, ["pod"], heads, pack_keys(keys), packed, [])
    with pytest.raises(DecodeError, match="impossible chain"):
        decode(head() + msgpack.packb(body))


@pytest.mark.parametrize("age_s", [float("nan"), float("inf"), -1.0, 4000.0])
def test_absurd_ages_are_refused(age_s: float) -> None:
    body: Any = (0.0, "", 0, [], b"", b"", codec._EVENT.pack(4, 0, 0, age_s, 1, 0, 0, 0, 0), [])
    with pytest.raises(DecodeError, match="old"):
        decode(head() + msgpack.packb(body))


@pytest.mark.parametrize("at_s", [float("nan"), float("inf"), -1.0, 1e12])
def test_absurd_times_are_refused(at_s: float) -> None:
    data = encode(PeerMessage(Life(1), "", 1, 256, at_s=at_s))
    with pytest.raises(DecodeError, match="float from 0"):
        decode(data)
