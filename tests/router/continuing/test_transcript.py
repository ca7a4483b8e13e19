"""The text sent so far is read correctly wherever its chunks end, and is kept within bounds."""

from __future__ import annotations

import tracemalloc
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.sse import DONE, SseDecoder, sse_event
from engine.contract.requests import Endpoint
from router.continuing.chats import ChatRewriter
from router.continuing.continuations import Continuation, needs_so_far
from router.continuing.resume import ask, continuation_of, ending, obstacle
from router.continuing.transcript import (
    FOLD_BYTES,
    MAX_TEXT_BYTES,
    RESERVE_BYTES,
    SentEvents,
    Transcript,
    empty_transcript,
)


def chat_event(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return sse_event(orjson.dumps({"id": "i", "created": 5, "model": "m", "choices": [choice], **more}))


def text_event(text: str, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return sse_event(orjson.dumps({"id": "i", "created": 5, "model": "m", "choices": [choice], **more}))


def transcript_of(endpoint: Endpoint, *events: bytes) -> Transcript:
    record = SentEvents(endpoint, lambda size: True)
    for event in events:
        record.add(event)
    return record.read()


@given(st.lists(st.text(max_size=2000), max_size=60), st.booleans())
def test_all_that_was_said_is_read(pieces: list[str], is_chat: bool) -> None:
    room = 0

    def keep(size: int) -> bool:
        nonlocal room
        room += size
        return True

    endpoint = Endpoint.CHAT if is_chat else Endpoint.COMPLETIONS
    record = SentEvents(endpoint, keep)
    for piece in pieces:
        record.add(chat_event({"content": piece}) if is_chat else text_event(piece))
        held = record._size + (record._transcript.text_bytes if record._transcript else 0)
        assert held <= room <= held + FOLD_BYTES + RESERVE_BYTES + 20_000
        assert record._size <= FOLD_BYTES + 20_000
    transcript = record.read()
    assert (transcript.text, transcript.made, transcript.obstacle) == ("".join(pieces), len(pieces), "")


def test_no_more_is_kept_than_there_is_room_for() -> None:
    left = 3 * RESERVE_BYTES

    def keep(size: int) -> bool:
        nonlocal left
        left -= size
        return left >= 0

    record = SentEvents(Endpoint.COMPLETIONS, keep)
    for _ in range(200):
        record.add(text_event("x" * 100))
    assert not record.is_kept
    assert not record._chunks

    record = SentEvents(Endpoint.COMPLETIONS, lambda size: True)
    for _ in range(2 + MAX_TEXT_BYTES // 10_000):
        record.add(text_event("x" * 10_000))
    assert not record.is_kept

    record = SentEvents(Endpoint.COMPLETIONS, lambda size: True)
    for _ in range(2 + MAX_TEXT_BYTES // 10_000):
        record.add(b"data: " + b"y" * 10_000)  # an event without an end
    assert not record.is_kept


@pytest.mark.parametrize("word", [" word{}", "字{}", "a{}🙂"])
def test_it_takes_no_more_memory_than_it_reserves(word: str) -> None:
    room = 0

    def keep(size: int) -> bool:
        nonlocal room
        room += size
        return True

    tracemalloc.start()
    try:
        record = SentEvents(Endpoint.COMPLETIONS, keep)
        for i in range(15_000):
            record.add(text_event(word.format(i)))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert record.is_kept
    assert taken < 1.5 * room + 2 * FOLD_BYTES


@pytest.mark.parametrize(
    ("events", "what"),
    [
        ([chat_event({"tool_calls": [{"index": 0}]})], "tool_calls"),
        ([chat_event({"reasoning_content": "hm"})], "reasoning_content"),
        ([chat_event({"content": "a", "refusal": None, "tool_calls": []})], ""),
        ([b'data: {"choices": [{"index": 1, "delta": {"content": "x"}}]}\n\n'], "several choices"),
        ([b'data: {"choices": [{"index": 0, "delta": {"content": 7}}]}\n\n'], "an event that is not one of the API"),
        ([b"data: 7\n\n"], "an event that is not one of the API"),
        (
            [b'data: {"choices": [{"index": 0, "delta": {"content": "x"}, "logprobs": {"content": [1]}}]}\n\n'],
            "log-probabilities",
        ),
    ],
)
def test_what_another_engine_could_not_go_on_from(events: list[bytes], what: str) -> None:
    transcript = transcript_of(Endpoint.CHAT, *events)
    assert obstacle(Endpoint.CHAT, {"messages": []}, transcript) == what


@given(st.lists(st.binary(max_size=40).map(lambda data: data.replace(b"\n", b""))))
def test_no_event_of_an_engine_raises(datas: list[bytes]) -> None:
    transcript, rewriter = (
        Transcript(Endpoint.CHAT),
        ChatRewriter(transcript_of(Endpoint.CHAT), Continuation.PROMPT, None),
    )
    for data in datas:
        transcript.read(data)
        rewriter.feed(sse_event(data))


json = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**40) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "usage",
                    "delta",
                    "role",
                    "content",
                    "index",
                    "finish_reason",
                    "prompt_tokens",
                    "completion_tokens",
                    "prompt_tokens_details",
                    "cached_tokens",
                    "logprobs",
                    "text",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
)


@given(
    st.lists(st.dictionaries(st.sampled_from(["choices", "usage", "id"]), json)), st.sampled_from(list(Continuation))
)
def test_no_json_of_an_engine_raises(events: list[Any], continuation: Continuation) -> None:
    first = transcript_of(Endpoint.CHAT, chat_event({"role": "assistant", "content": "a"}))
    transcript, rewriter = Transcript(Endpoint.COMPLETIONS), ChatRewriter(first, continuation, 3)
    for event in events:
        transcript.read(orjson.dumps(event))
        rewriter.feed(sse_event(orjson.dumps(event)))


# -- the request for the rest ------------------------------------------------------------------------------------------

OURS = {"owned_by": "warmroute", "accepts": ["answer_so_far"]}
VLLM, SGLANG, OTHER = ({"owned_by": kind} for kind in ("vllm", "sglang", "someone"))


@pytest.mark.parametrize(
    ("card", "endpoint", "fields", "text", "continuation"),
    [
        (OURS, Endpoint.CHAT, {}, " a ", Continuation.SO_FAR),
        (OURS, Endpoint.COMPLETIONS, {"prompt": [1, 2]}, "a", Continuation.SO_FAR),
        (OURS, Endpoint.CHAT, {"presence_penalty": 1.0}, "a", Continuation.SO_FAR),
        (VLLM, Endpoint.CHAT, {}, "a", Continuation.MESSAGE),
        (VLLM, Endpoint.CHAT, {}, "a\n", None),
        (VLLM, Endpoint.CHAT, {}, "a</think>b", None),
        (VLLM, Endpoint.CHAT, {"presence_penalty": 1.0}, "a", None),
        (OURS, Endpoint.CHAT, {"response_format": {"type": "json_object"}}, "{", Continuation.SO_FAR),
        (VLLM, Endpoint.CHAT, {"response_format": {"type": "json_object"}}, "{", None),
        (VLLM, Endpoint.CHAT, {"response_format": {"type": "text"}}, "a", Continuation.MESSAGE),
        (VLLM, Endpoint.COMPLETIONS, {"prompt": "p", "guided_regex": "a*"}, "a", None),
        (SGLANG, Endpoint.CHAT, {}, " a\n", Continuation.MESSAGE),
        (OTHER, Endpoint.CHAT, {}, "a", None),
        (OTHER, Endpoint.CHAT, {}, "", Continuation.ANEW),
        (OTHER, Endpoint.COMPLETIONS, {"prompt": "p"}, " a ", Continuation.PROMPT),
        (OTHER, Endpoint.COMPLETIONS, {"prompt": [1, 2]}, "a", None),
        ({"accepts": 7}, Endpoint.CHAT, {}, "a", None),
    ],
)
def test_how_an_engine_is_told(
    card: dict[str, Any], endpoint: Endpoint, fields: dict[str, Any], text: str, continuation: Continuation | None
) -> None:
    event = chat_event({"content": text}) if endpoint is Endpoint.CHAT else text_event(text)
    transcript = transcript_of(endpoint, *([event] if text else []))
    assert continuation_of(card, endpoint, fields, transcript) is continuation


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        (Endpoint.CHAT, {"response_format": {"type": "json_object"}}),
        (Endpoint.COMPLETIONS, {"guided_choice": ["a", "b"]}),
        (Endpoint.COMPLETIONS, {"structured_outputs": {"regex": "a*"}}),
        (Endpoint.MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {}}}}),
        (Endpoint.RESPONSES, {"text": {"format": {"type": "json_object"}, "verbosity": "low"}}),
    ],
)
def test_structured_output_goes_on_at_our_engines_alone(endpoint: Endpoint, fields: dict[str, Any]) -> None:
    assert needs_so_far(fields)
    assert obstacle(endpoint, fields, Transcript(endpoint)) == ""
    assert not needs_so_far({"response_format": None, "text": {}, "output_config": {}})


@pytest.mark.parametrize(
    ("limits", "asked"),
    [
        ({}, {"max_tokens": 14}),
        ({"max_tokens": None}, {"max_tokens": 14}),
        ({"max_tokens": 5, "min_tokens": 1}, {"max_tokens": 3, "min_tokens": 0}),
    ],
)
def test_fewer_tokens_are_asked_for(limits: dict[str, Any], asked: dict[str, Any]) -> None:
    transcript = transcript_of(Endpoint.COMPLETIONS, text_event("a"), text_event("b"))
    body = orjson.loads(ask(Endpoint.COMPLETIONS, {"prompt": "p", **limits}, transcript, Continuation.PROMPT))
    assert body == {"prompt": "pab", **asked}


@pytest.mark.parametrize(
    ("endpoint", "name"),
    [
        (Endpoint.CHAT, "max_completion_tokens"),
        (Endpoint.COMPLETIONS, "max_tokens"),
        (Endpoint.COMPLETIONS, "min_tokens"),
        (Endpoint.MESSAGES, "max_tokens"),
        (Endpoint.RESPONSES, "max_output_tokens"),
    ],
)
def test_a_limit_that_is_no_number_is_not_guessed_at(endpoint: Endpoint, name: str) -> None:
    """vLLM reads "100" as 100."""
    transcript = empty_transcript(endpoint)
    transcript.made = 2
    for value, what in ((100, ""), (None, ""), ("100", name), (100.0, name)):
        assert obstacle(endpoint, {name: value}, transcript) == what


def test_a_stop_string_across_the_seam_is_not_missed() -> None:
    transcript = transcript_of(Endpoint.COMPLETIONS, text_event("the EN"))
    assert obstacle(Endpoint.COMPLETIONS, {"prompt": "p", "stop": ["END"]}, transcript) == "stop"
    assert obstacle(Endpoint.COMPLETIONS, {"prompt": "p", "stop": "END"}, transcript) == "stop"
    assert obstacle(Endpoint.COMPLETIONS, {"prompt": "p", "stop": ["AND"]}, transcript) == ""


USAGE = {"stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("fields", "events", "prompt_tokens", "what"),
    [
        ({"max_tokens": 9}, [text_event("a")], None, None),
        ({"max_tokens": 1}, [text_event("a")], None, ["length", "[DONE]"]),
        ({"max_tokens": 1, **USAGE}, [text_event("a")], None, None),
        ({"max_tokens": 1, **USAGE}, [text_event("a")], 4, ["length", "4+1=5", "[DONE]"]),
        ({"max_tokens": 9}, [text_event("a"), text_event("", "stop")], None, ["[DONE]"]),
        ({"max_tokens": 9, **USAGE}, [text_event("a"), text_event("", "stop")], 4, ["4+1=5", "[DONE]"]),
        ({"max_tokens": 9}, [text_event("a"), text_event("", "stop"), DONE], None, []),
    ],
)
def test_an_end_that_is_missing_is_added(
    fields: dict[str, Any], events: list[bytes], prompt_tokens: int | None, what: list[str] | None
) -> None:
    missing = ending(Endpoint.COMPLETIONS, fields, transcript_of(Endpoint.COMPLETIONS, *events), prompt_tokens)
    if what is None:
        assert missing is None
        return
    assert missing is not None
    seen = []
    for data in SseDecoder().feed(missing):
        event = {} if data == b"[DONE]" else orjson.loads(data)
        assert event == {} or (event["id"], event["created"], event["model"]) == ("i", 5, "m")
        if usage := event.get("usage"):
            seen.append(f"{usage['prompt_tokens']}+{usage['completion_tokens']}={usage['total_tokens']}")
        else:
            seen.append(event["choices"][0]["finish_reason"] if event else "[DONE]")
    assert seen == what
