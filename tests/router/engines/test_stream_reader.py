"""Where a stream's answer begins and ends, whatever stands around it and however it is cut into chunks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.sse import DONE, named_event, sse_event
from engine.contract.requests import Endpoint
from router.engines.attempt_result import ErrorEvent, GaveUp
from router.engines.engine_client import BrokeOff
from router.engines.stream_reader import HELD_BYTES, StreamFailed, StreamReader, beginning
from router.engines.usage import Usage

Events = list[bytes]
CHAT, COMPLETIONS, MESSAGES, RESPONSES = (
    Endpoint.CHAT,
    Endpoint.COMPLETIONS,
    Endpoint.MESSAGES,
    Endpoint.RESPONSES,
)


def event(fields: Any) -> bytes:
    return sse_event(orjson.dumps(fields))


def named(kind: str, **fields: Any) -> bytes:
    return named_event(kind, orjson.dumps({"type": kind, **fields}))


def delta(reason: str | None = None, **fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]})


def text(said: str, reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": said, "finish_reason": reason}]})


COUNTS = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
IN_OUT = {"input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 3}
RESPONSE = {
    "object": "response",
    "usage": {"input_tokens": 9, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 4}},
}
SILENT: dict[str, Events] = {
    CHAT: [
        *(b": keep-alive\n\n", b":\n\n", b"\n\n", b"data:\n\n", b"event: ping\ndata: {}\n\n", b"retry: 100\n\n"),
        delta(role="assistant"),
        delta(role="assistant", content=""),
        delta(content=None, tool_calls=[]),
        event({"choices": []}),
        event({"choices": [], "prompt_filter_results": [{}]}),
    ],
    COMPLETIONS: [b": ping\r\n\r\n", text(""), event({"choices": []})],
    MESSAGES: [
        b": ping\n\n",
        named("ping"),
        named("message_start", message={"id": "m", "usage": {**IN_OUT, "output_tokens": 0}}),
        named("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        named("content_block_delta", index=0, delta={"type": "text_delta", "text": ""}),
    ],
    RESPONSES: [
        b": ping\n\n",
        named("response.created", response={"id": "resp_1", "usage": None}),
        named("response.in_progress", response={"id": "resp_1", "usage": None}),
        named("response.output_item.added", item={"type": "message", "content": []}),
        named("response.content_part.added", part={"type": "output_text", "text": ""}),
        named("response.output_text.delta", delta=""),
    ],
}
"""Events by which no token has come."""
TOKENS: dict[str, Events] = {
    CHAT: [
        delta(content="a"),
        delta(role="assistant", content="a"),
        delta(reasoning_content="hm"),
        delta(tool_calls=[{"index": 0, "function": {"name": "f"}}]),
        delta("stop"),
        event({"choices": [{"index": 0, "delta": {"content": ""}}], "usage": {"completion_tokens": 1}}),
    ],
    COMPLETIONS: [text("a"), text("", "length")],
    MESSAGES: [
        named("content_block_delta", index=0, delta={"type": "text_delta", "text": "a"}),
        named("content_block_delta", index=0, delta={"type": "input_json_delta", "partial_json": "{"}),
        named("content_block_start", index=0, content_block={"type": "tool_use", "name": "f"}),
        named("message_delta", delta={"stop_reason": "max_tokens"}, usage=IN_OUT),
    ],
    RESPONSES: [
        named("response.output_text.delta", delta="a"),
        named("response.reasoning_text.delta", delta="a"),
        named("response.output_item.added", item={"type": "function_call", "name": "f"}),
    ],
}
ENDS: dict[str, list[Events]] = {
    CHAT: [[delta("stop"), DONE], [delta("stop", content="z"), event({"choices": [], "usage": COUNTS}), DONE]],
    COMPLETIONS: [[text("z", "stop"), DONE], [text("", "length"), event({"usage": COUNTS, "choices": []}), DONE]],
    MESSAGES: [[named("message_delta", delta={"stop_reason": "end_turn"}, usage=IN_OUT), named("message_stop")]],
    RESPONSES: [[named(f"response.{end}", response=RESPONSE)] for end in ("completed", "incomplete")],
}
APIS = sorted(SILENT)
api = st.sampled_from(APIS)


class Chunks:
    """A body in these chunks."""

    def __init__(self, chunks: Sequence[bytes]) -> None:
        self._chunks = [chunk for chunk in chunks if chunk]

    @property
    def is_read(self) -> bool:
        return not self._chunks

    async def readany(self) -> bytes:
        return self._chunks.pop(0) if self._chunks else b""


def split(data: st.DataObject, stream: bytes) -> list[bytes]:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=8)))
    return [stream[a:b] for a, b in itertools.pairwise([0, *cuts, len(stream)])]


@given(api, st.data())
def test_what_comes_before_the_first_token_is_no_beginning(endpoint: str, data: st.DataObject) -> None:
    silent = data.draw(st.lists(st.sampled_from(SILENT[endpoint]), max_size=9))
    token = data.draw(st.sampled_from(TOKENS[endpoint]))
    reader = StreamReader(endpoint)
    for part in silent:
        reader.read(part)
    assert not reader.has_begun
    assert not reader.is_alive(b"".join(silent))
    assert reader.is_alive(token)
    reader.read(token)
    assert reader.has_begun

    reader = StreamReader(endpoint)
    begun = asyncio.run(beginning(Chunks(split(data, b"".join([*silent, token, b"more"]))), reader))
    assert reader.has_begun
    assert token in begun
    assert begun.count(b": keep-alive") <= b"".join(silent).count(b": keep-alive")


@given(api, st.data())
def test_a_stream_without_a_token_breaks_off(endpoint: str, data: st.DataObject) -> None:
    silent = b"".join(data.draw(st.lists(st.sampled_from(SILENT[endpoint]), max_size=9)))
    with pytest.raises(BrokeOff, match="without a token"):
        asyncio.run(beginning(Chunks(split(data, silent)), StreamReader(endpoint)))


def test_comments_are_not_held_back_for_ever_and_announcements_are_bounded() -> None:
    reader = StreamReader(CHAT)
    with pytest.raises(BrokeOff):
        asyncio.run(beginning(Chunks([b": keep-alive\n\n" * 100] * 1000), reader))
    long = [SILENT[RESPONSES][1] * 100] * (HELD_BYTES // 1000)
    held = asyncio.run(beginning(Chunks(long), reader))
    assert HELD_BYTES < len(held) < 2 * HELD_BYTES


@given(api, st.data())
def test_an_answer_may_end_after_its_end_mark_and_nowhere_before(endpoint: str, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.sampled_from(TOKENS[endpoint][:1]), min_size=1, max_size=4))
    end = data.draw(st.sampled_from(ENDS[endpoint]))
    noise = data.draw(st.lists(st.sampled_from(SILENT[endpoint][:2]), max_size=3))
    reader = StreamReader(endpoint)
    for part in [*tokens, *noise]:
        reader.read(part)
        assert not reader.is_over
    for part in [*end, *noise]:
        reader.read(part)
    assert reader.has_end
    assert reader.is_over


@given(api, st.data(), st.integers(0, 9000))
def test_counts_are_read_however_the_end_is_cut_and_whatever_follows(
    endpoint: str, data: st.DataObject, after: int
) -> None:
    end = ENDS[endpoint][-1]
    reader = StreamReader(endpoint)
    for part in [*SILENT[endpoint][:3], TOKENS[endpoint][0], *end, b": " + b"x" * after + b"\n\n"]:
        reader.read(part)
    assert reader.usage() == Usage(9, 3, 4, is_final=True)
    assert reader.usage(is_broken=True).is_broken


ERRORS = [
    event({"error": {"message": "lost", "code": 500}}),
    b'event: error\ndata: {"message": "lost"}\n\n',
    b"event: error\ndata: lost\n\n",
    b'data: {"error":\ndata: {"message": "lost"}}\n\n',
    event({"choices": [{"index": 0, "delta": {"content": "x"}}], "error": {"message": "lost"}}),
    event({"error": "lost"}),
    named("error", error={"type": "api_error", "message": "lost"}),
    named("response.failed", response={"error": {"message": "lost"}}),
]


@given(api, st.data(), st.sampled_from(ERRORS))
def test_an_error_is_found_in_any_clothes(endpoint: str, data: st.DataObject, error: bytes) -> None:
    before = b"".join(data.draw(st.lists(st.sampled_from(TOKENS[endpoint][:3] + SILENT[endpoint]), max_size=5)))
    reader = StreamReader(endpoint)
    with pytest.raises(StreamFailed) as failed:
        reader.read(before + error + DONE)
    assert failed.value.at == len(before)
    assert failed.value.message == "lost"
    assert isinstance(failed.value.observed, ErrorEvent)


@pytest.mark.parametrize(("reason", "kind"), [("abort", GaveUp), ("error", ErrorEvent)])
@pytest.mark.parametrize("make", [lambda reason: delta(reason, content="x"), lambda reason: text("x", reason)])
def test_some_reasons_are_failures(reason: str, kind: type, make: Any) -> None:
    with pytest.raises(StreamFailed) as failed:
        StreamReader(CHAT).read(make(reason))
    assert isinstance(failed.value.observed, kind)


@given(st.text(), api)
def test_generated_text_is_a_token_whatever_it_says(said: str, endpoint: str) -> None:
    for words in (said, f'{said}"error": "abort" [DONE]', f'{said}\n\ndata: {{"error": "x"}}\n\nevent: error\n\n'):
        tokens: dict[str, bytes] = {
            CHAT: delta(content=words),
            COMPLETIONS: text(words),
            MESSAGES: named("content_block_delta", index=0, delta={"type": "text_delta", "text": words}),
            RESPONSES: named("response.output_text.delta", delta=words),
        }
        reader = StreamReader(endpoint)
        reader.read(tokens[endpoint])
        assert not reader.has_end
        assert reader.has_begun is bool(words)


def test_of_several_answers_each_tells_its_reason() -> None:
    reader = StreamReader(CHAT, answers=2)
    reader.read(delta(content="a") + delta("stop"))
    assert not reader.is_over
    reader.read(event({"choices": [{"index": 1, "delta": {}, "finish_reason": "stop"}]}))
    assert reader.is_over
