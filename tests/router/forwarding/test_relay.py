"""How a stream is copied, for any bytes, wherever they are split."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.contract.errors import ApiError
from router.engines.engine_client import BrokeOff
from router.engines.stream_reader import StreamReader
from router.engines.usage import Usage, usage_in
from router.forwarding.relay import HELD_BYTES, Relay, StreamBroke

ERROR = ApiError("broken")
ERROR_EVENT = b"data: " + ERROR.body() + b"\n\n"
UNKNOWN = "/v1/unknown"
"""An API whose end marks are not known: any event is a token, and the stream ends with its connection."""


class Source:
    """Plays chunks, then ends or raises."""

    def __init__(self, chunks: list[bytes], error: Exception | None = None, *, ends_at_once: bool = False) -> None:
        self._chunks = list(chunks)
        self._error = error
        self._ends_at_once = ends_at_once

    @property
    def is_read(self) -> bool:
        return self._ends_at_once and not self._chunks

    async def readany(self) -> bytes:
        if self._chunks:
            return self._chunks.pop(0)
        if self._error:
            raise self._error
        return b""


class Sink:
    def __init__(self) -> None:
        self.data = b""
        self.writes: list[bytes] = []
        self.ended = False

    async def write(self, data: bytes) -> None:
        assert data, "an empty write ends a chunked body"
        self.writes.append(data)
        self.data += data

    async def write_eof(self, data: bytes = b"") -> None:
        if data:
            await self.write(data)
        self.ended = True


def relay(chunks: list[bytes], error: Exception | None = None, *, ends_at_once: bool = False) -> tuple[Sink, bool]:
    """Relay a stream of these chunks. Return what arrived, and whether the stream broke."""

    async def run() -> tuple[Sink, bool]:
        sink = Sink()
        source: Any = Source(chunks[1:], error, ends_at_once=ends_at_once)
        writer: Any = sink
        deadline_s = asyncio.get_running_loop().time() + 60
        it = Relay(source, writer, reader=StreamReader(UNKNOWN), idle_s=5.0, deadline_s=deadline_s)
        try:
            await it.copy(chunks[0])
        except StreamBroke:
            await it.end_with(ERROR_EVENT)
            return sink, True
        return sink, False

    return asyncio.run(run())


events = st.lists(st.sampled_from([b"data: 1", b"data: {}", b": c", b"\n\n", b"\n", b"\r\n\r\n", b"\r\n", b"\r", b"x"]))
pieces = st.lists(st.one_of(st.binary(min_size=1), events.map(b"".join).filter(bool)), min_size=1)


@given(pieces, st.booleans())
def test_every_byte_arrives_in_order(chunks: list[bytes], ends_at_once: bool) -> None:
    """`ends_at_once`: the end comes with the last chunk."""
    sink, broke = relay(chunks, ends_at_once=ends_at_once)
    assert sink.data == b"".join(chunks)
    assert sink.ended
    assert not broke


@given(st.lists(st.text(max_size=20), min_size=1), st.data())
def test_a_break_anywhere_leaves_whole_events_and_the_error(texts: list[str], data: st.DataObject) -> None:
    whole = b"".join(b"data: " + text.encode().hex().encode() + b"\n\n" for text in texts)
    sent = whole[: data.draw(st.integers(1, len(whole)))]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sent)))) | {len(sent)})
    chunks = [sent[a:b] for a, b in zip([0, *cuts], cuts, strict=False)]
    sink, broke = relay(chunks, BrokeOff("gone"))
    assert broke
    assert not sink.ended
    before = sink.data.removesuffix(ERROR_EVENT)
    assert before + ERROR_EVENT == sink.data
    assert before == sent[: sent.rfind(b"\n\n") + 2 if b"\n\n" in sent else 0]


def test_an_event_is_not_held_for_ever_and_a_break_within_it_is_still_its_own_event() -> None:
    long = b"data: " + b"x" * HELD_BYTES
    sink, _ = relay([long, b"more"], BrokeOff("gone"))
    assert sink.data == long + b"\n\n" + ERROR_EVENT


def test_an_error_follows_a_long_event_that_has_ended_as_it_follows_any_other() -> None:
    """Nothing is written between the two. If the event were cut, the gateway would have to end it first."""
    long = [b"data: " + b"x" * HELD_BYTES, b"the end\n\n"]
    for chunks in (long, [*long, b"data: short\n\n"], [*long, b"data: cut"]):
        sink, is_broken = relay(chunks, BrokeOff())
        assert is_broken
        assert sink.data == b"".join(chunks).removesuffix(b"data: cut") + ERROR_EVENT


def test_whole_events_are_not_joined() -> None:
    sink, _ = relay([b"data: 1\n\n", b"data: 2\n\n"])
    assert sink.writes == [b"data: 1\n\n", b"data: 2\n\n"]


class Paced(Source):
    """Plays chunks with these pauses before each, then is silent."""

    def __init__(self, pauses_s: list[float]) -> None:
        super().__init__([b"data: x\n\n"] * len(pauses_s))
        self._pauses_s = [*pauses_s, 1e6]

    async def readany(self) -> bytes:
        await asyncio.sleep(self._pauses_s.pop(0))
        return await super().readany()


@pytest.mark.looptime
@pytest.mark.parametrize("pauses_s", [[], [0.24], [0.24, 0.99], [0.99, 0.01, 0.23, 0.98], [0.5] * 9])
async def test_silence_counts_from_the_last_chunk(pauses_s: list[float]) -> None:
    now_s = asyncio.get_running_loop().time
    started_s = now_s()
    source: Any = Paced(pauses_s)
    sink: Any = Sink()
    copies = Relay(source, sink, reader=StreamReader(UNKNOWN), idle_s=1.0, deadline_s=started_s + 60)
    with pytest.raises(StreamBroke, match="silent"):
        await copies.copy(b"data: x\n\n")
    assert sink.data == b"data: x\n\n" * (1 + len(pauses_s))
    silent_s = now_s() - started_s - sum(pauses_s)
    assert 1.0 - 1e-6 <= silent_s <= 1.25 + 1e-6


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        (b'{"usage": {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": null}}', Usage(7, 3, None)),
        (b'"usage":{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":5}}', Usage(7, None, 5)),
        (b'"text": "\\"cached_tokens\\": 9", "x": {"cached_tokens": 1}', Usage(None, None, 1)),
        (b'"text": "\\"cached_tokens\\": 9"', Usage()),
        (b'"cached_tokens": "many", "prompt_tokens": -1', Usage()),
        (b"data: [DONE]\n\n", Usage()),
        (b"", Usage()),
    ],
)
def test_usage_is_found_at_the_end(tail: bytes, usage: Usage) -> None:
    assert usage_in(tail) == usage


@given(st.text())
def test_generated_text_cannot_pass_for_usage(text: str) -> None:
    import json

    answer = {"choices": [{"text": text + '"cached_tokens": 9'}], "usage": {"cached_tokens": 3}}
    assert usage_in(json.dumps(answer).encode()).cached_tokens == 3
