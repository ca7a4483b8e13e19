"""Registry messages and SSE: round trips, golden bytes, and every kind of damage refused."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common import sse
from engine.common.sse import DONE, SseDecoder, sse_event
from engine.contract import events
from engine.contract.events import DecodeError, MessageKind, RegistryMessage, decode, encode
from engine.contract.load import MAX_BLOCK_SIZE, MAX_REQUESTS, MAX_STEP_S, MAX_TOKEN_S, MAX_TOKENS, LoadReport, StepCost

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
keys = st.lists(u64, max_size=20).map(tuple)
step_s, token_s = st.floats(0, MAX_STEP_S), st.floats(0, MAX_TOKEN_S)
cost = st.builds(StepCost, step_s, token_s, token_s, token_s, step_s)
requests, tokens = st.integers(0, MAX_REQUESTS), st.integers(0, MAX_TOKENS)
block_size = st.integers(0, MAX_BLOCK_SIZE)
load = st.builds(LoadReport, requests, requests, tokens, requests, tokens, u32, u32, block_size, cost)
kinds = st.sampled_from([MessageKind.DELTA, MessageKind.SNAPSHOT])
messages = st.builds(RegistryMessage, kinds, u32, u64, u64, load, keys, st.tuples(keys, keys, keys))


@given(messages)
def test_round_trip(message: RegistryMessage) -> None:
    assert decode(encode(message)) == message


@given(messages, st.data())
def test_a_truncated_or_longer_message_is_refused(message: RegistryMessage, data: st.DataObject) -> None:
    whole = encode(message)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(DecodeError):
        decode(whole[:cut])
    with pytest.raises(DecodeError):
        decode(whole + b"x")


@given(st.binary(max_size=400))
def test_noise_is_refused_or_decoded_but_never_crashes(noise: bytes) -> None:
    try:
        message = decode(noise)
    except DecodeError:
        return
    assert decode(encode(message)) == message


@pytest.mark.parametrize("name", ["base_s", "token_s", "attention_s", "context_s", "sequence_s"])
@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1e-9, 61.0])
def test_absurd_costs_are_refused_whole(name: str, seconds: float) -> None:
    report = LoadReport(running=1, cost=StepCost(**{name: seconds}))
    with pytest.raises(DecodeError, match="absurd costs"):
        decode(encode(RegistryMessage(MessageKind.DELTA, 256, 1, 1, report)))


@pytest.mark.parametrize("name", ["running", "waiting", "decoding", "uncached_tokens", "context_tokens", "block_size"])
def test_absurd_counts_are_refused_whole(name: str) -> None:
    number = 2**60 if name.endswith("tokens") else 2**31
    with pytest.raises(DecodeError, match="absurd counts"):
        decode(encode(RegistryMessage(MessageKind.SNAPSHOT, 256, 1, 1, LoadReport(**cast(Any, {name: number})))))


def test_more_keys_than_the_bound_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_KEYS", 4)
    message = RegistryMessage(MessageKind.DELTA, 256, 1, 1, LoadReport(), (1, 2), ((3,), (4,), ()))  # type: ignore[arg-type]
    assert decode(encode(message)) == message
    more = RegistryMessage(MessageKind.DELTA, 256, 1, 1, LoadReport(), (1, 2), ((3,), (4,), (5,)))  # type: ignore[arg-type]
    with pytest.raises(DecodeError, match="5 keys, more than 4"):
        decode(encode(more))


def test_another_version_is_refused_with_the_remedy() -> None:
    whole = bytearray(encode(RegistryMessage(MessageKind.DELTA, 256, 1, 1, LoadReport())))
    whole[0] = 2
    with pytest.raises(DecodeError, match=r"version 2.*upgrade"):
        decode(bytes(whole))


def test_golden_bytes() -> None:
    message = RegistryMessage(
        MessageKind.DELTA,
        256,
        0x1122334455667788,
        9,
        LoadReport(1, 2, 3, 4, 5, 6, 7, 16),
        *cast(Any, ((10,), ((11, 12), (), (13,)))),
    )
    head = "01 02".replace("02", "01") + " 00 00 00 01 00 00 88 77 66 55 44 33 22 11 09 00 00 00 00 00 00 00"
    load_hex = "01000000 02000000 0300000000000000 04000000 0500000000000000 06000000 07000000 10000000" + "00" * 40
    counts = "01000000 02000000 00000000 01000000"
    lists = "".join(n.to_bytes(8, "little").hex() for n in (10, 11, 12, 13))
    assert encode(message).hex() == (head + load_hex + counts + lists).replace(" ", "")


@given(
    st.lists(
        st.text(alphabet=st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=30), max_size=8
    ),
    st.sampled_from([0, 1, 7, sse.GATHERED_FROM]),
    st.data(),
)
def test_sse_decodes_at_any_chunk_border(texts: list[str], gathered_from: int, data: st.DataObject) -> None:
    stream = b"".join(sse_event(text.encode()) for text in texts) + b": comment\n\n" + DONE
    if data.draw(st.booleans()):
        stream = stream.replace(b"\n", b"\r\n")
    decoder, out = SseDecoder(), list[bytes]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sse, "GATHERED_FROM", gathered_from)
        while stream:
            size = data.draw(st.integers(1, len(stream)))
            out += decoder.feed(stream[:size])
            stream = stream[size:]
    assert out == [*(text.encode() for text in texts), b"[DONE]"]


class Copied(bytes):
    """A chunk that counts the bytes which are copied when it is appended to others."""

    copied_bytes = 0

    def __radd__(self, before: bytes) -> bytes:
        Copied.copied_bytes += len(before) + len(self)
        return bytes(before) + bytes(self)


def test_the_work_for_a_large_sse_event_grows_with_its_size_and_not_with_the_square() -> None:
    text, chunk_bytes = b"x" * 2**20, 1400
    stream, decoder, out = sse_event(text), SseDecoder(), list[bytes]()
    Copied.copied_bytes = 0
    for start in range(0, len(stream), chunk_bytes):
        out += decoder.feed(Copied(stream[start : start + chunk_bytes]))
    assert out == [text]
    assert Copied.copied_bytes < 4 * len(text)


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_a_large_sse_event_of_many_lines_takes_as_long_with_any_ends_of_lines(line_end: bytes) -> None:
    line, lines = b"x" * 90, 20_000
    stream, decoder, out = (b"data: " + line + line_end) * lines + line_end + b":", SseDecoder(), list[bytes]()
    began_s = time.thread_time()
    for start in range(0, len(stream), 1000):
        out += decoder.feed(stream[start : start + 1000])
    assert out == [b"\n".join([line] * lines)]
    assert time.thread_time() - began_s < 1  # 0.05 s; when each piece led to a search of all before it, 10 s


@pytest.mark.parametrize("max_bytes", [100, 2 * sse.GATHERED_FROM])
@pytest.mark.parametrize("chunk_bytes", [30, 2**20])
def test_sse_event_is_bounded(max_bytes: int, chunk_bytes: int) -> None:
    stream = b"data: " + b"x" * 3 * max_bytes
    chunks = iter([stream[start : start + chunk_bytes] for start in range(0, len(stream), chunk_bytes)])
    with pytest.raises(ValueError, match=f"larger than {max_bytes} bytes"):
        list(itertools.chain.from_iterable(map(SseDecoder(max_bytes).feed, chunks)))
    unread_bytes = sum(map(len, chunks))
    assert len(stream) - unread_bytes <= max_bytes + chunk_bytes
