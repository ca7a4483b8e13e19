"""Gateways' messages survive encoding and decoding. Peer bytes are refused."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.events import DecodeError, UnknownVersion, pack_keys
from engine.contract.keys import PrefixKey, prefix_keys
from router.peer_sync import codec
from router.peer_sync.codec import decode, encode
from router.peer_sync.messages import (
    Began,
    Ended,
    Forgotten,
    InFlight,
    Life,
    PeerMessage,
    Refuted,
    Routed,
    Undone,
    Wish,
    Written,
)
from router.views.types import PodId

AGES = st.floats(0, 3000, width=32)
NUMBERS = st.integers(0, 2**32 - 1)
PODS = st.text(min_size=1, max_size=30).map(PodId)
TOKENS = st.integers(0, 2**30)
SESSIONS = st.one_of(st.text(max_size=60), st.text("0123456789abcdef", min_size=32, max_size=32))
CHAINS = st.text("ab", max_size=40).map(lambda text: prefix_keys(text.encode(), 7, 2))
EVENTS: Any = st.one_of(
    st.builds(Routed, AGES, NUMBERS, PODS, SESSIONS, CHAINS, TOKENS, TOKENS, TOKENS),
    st.builds(InFlight, AGES, NUMBERS, PODS, TOKENS, TOKENS, TOKENS, st.booleans()),
    st.builds(Began, AGES, NUMBERS, st.none() | TOKENS),
    st.builds(Ended, AGES, NUMBERS),
    st.builds(Undone, AGES, PODS, CHAINS),
    st.builds(Refuted, AGES, PODS, CHAINS, NUMBERS, TOKENS),
    st.builds(Forgotten, AGES, PODS, st.booleans()),
    st.builds(Written, AGES, PODS, st.booleans()),
    st.builds(Wish, AGES, st.integers(0, 2**64 - 1).map(Life)),
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


@given(message=MESSAGES)
def test_what_is_read_is_what_was_written(message: PeerMessage) -> None:
    assert decode(encode(message)) == message


@given(message=MESSAGES, at=st.integers(0, 4000), byte=st.integers(0, 255), cut=st.integers(0, 60))
@settings(max_examples=150)
def test_changed_bytes_are_refused_or_are_a_message_within_the_bounds(
    message: PeerMessage, at: int, byte: int, cut: int
) -> None:
    data = bytearray(encode(message))
    data[at % len(data)] = byte
    try:
        read = decode(bytes(data[: len(data) - cut]))
    except DecodeError:
        return
    for event in read.events:
        assert 0 <= event.age_s <= codec.MAX_AGE_S
        if isinstance(event, Routed | InFlight):
            assert max(event.prompt_tokens, event.uncached_tokens) <= codec.MAX_TOKENS


@given(data=st.binary(max_size=300))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    with contextlib.suppress(DecodeError):
        decode(data)


def routed(*chains: tuple[PrefixKey, ...]) -> bytes:
    events = tuple(Routed(0.0, i, PodId("pod"), "0" * 32, keys, 100, 50, 10) for i, keys in enumerate(chains))
    return encode(PeerMessage(Life(1), "", 1, 256, events))


def test_a_system_prompt_that_requests_share_is_told_once() -> None:
    prompt = bytes(range(256)) * 20
    chains = [prefix_keys(prompt + bytes([i]) * 512, 1) for i in range(10)]
    alone = len(routed(chains[0]))
    assert len(routed(*chains)) < alone + 9 * 100
    assert [event.keys for event in decode(routed(*chains)).events if isinstance(event, Routed)] == chains


def test_another_version_is_told_apart_from_nonsense() -> None:
    data = bytearray(routed(()))
    data[0] = 2
    with pytest.raises(UnknownVersion, match="upgrade"):
        decode(bytes(data))


def test_few_bytes_cannot_ask_for_much_memory() -> None:
    """Many chains that all begin with one long chain are counted before memory for them is allocated."""
    keys = tuple(PrefixKey(i) for i in range(60_000))
    chains, events = 200, 200
    head = codec._HEAD.pack(1, 0, 1, 256, 1, 1, 0.0, chains, events, len(keys))
    body = b"\0\3pod" + struct.pack("<III", 0, 0, len(keys)) + struct.pack("<III", 1, len(keys), 0) * (chains - 1)
    body += pack_keys(keys) + codec._EVENT.pack(5, 0, 0, 0.0, 0, 1, 0, 0, 0) * events
    with pytest.raises(DecodeError, match="impossible chain"):
        decode(head + body)


@pytest.mark.parametrize("age_s", [float("nan"), float("inf"), -1.0, 4000.0])
def test_absurd_ages_are_refused(age_s: float) -> None:
    data = encode(PeerMessage(Life(1), "", 1, 256, (Ended(0.0, 1),)))
    at = len(data) - codec._EVENT.size + 4
    with pytest.raises(DecodeError, match="old"):
        decode(data[:at] + struct.pack("<f", age_s) + data[at + 4 :])


@pytest.mark.parametrize("at_s", [float("nan"), float("inf"), -1.0, 1e12])
def test_absurd_times_are_refused(at_s: float) -> None:
    data = encode(PeerMessage(Life(1), "", 1, 256, at_s=at_s))
    with pytest.raises(DecodeError, match="time"):
        decode(data)
