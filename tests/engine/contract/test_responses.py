"""Requests to `/v1/responses` are read as equivalent chats, with prefix keys."""

from __future__ import annotations

import contextlib
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.errors import BadRequest
from engine.contract.requests import Endpoint, parse_body, request_head
from engine.contract.responses import MAX_ID_CHARS, kept_by_engine, response_messages, response_tools

Json = dict[str, Any]
TEXT = st.text(st.characters(exclude_characters="\x1e\x1f", exclude_categories=["Cs"]), max_size=30)
PART = st.builds(lambda kind, text: {"type": kind, "text": text}, st.sampled_from(["input_text", "output_text"]), TEXT)
IMAGE = TEXT.map(lambda url: {"type": "input_image", "image_url": url, "detail": "auto"})
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "developer"]), "content": TEXT | st.lists(PART | IMAGE, max_size=3)}
)
CALL = st.builds(
    lambda n, text: {"type": "function_call", "call_id": f"c{n}", "name": "f", "arguments": text},
    st.integers(0, 9),
    TEXT,
)
OUTPUT = st.builds(
    lambda n, text: {"type": "function_call_output", "call_id": f"c{n}", "output": text},
    st.integers(0, 9),
    TEXT | st.lists(PART, max_size=2),
)
REASONING = TEXT.map(lambda text: {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]})
BUILT_IN = TEXT.map(lambda text: {"type": "web_search_call", "action": {"type": "search", "query": text}})
REFERENCE = TEXT.map(lambda text: {"type": "item_reference", "id": text})
ITEM = st.one_of(TURN, CALL, OUTPUT, REASONING, BUILT_IN, REFERENCE)
TOOL = TEXT.map(lambda text: {"type": "function", "name": "f", "description": text, "parameters": {"type": "object"}})
REQUEST = st.fixed_dictionaries(
    {"input": st.lists(ITEM, min_size=1, max_size=4)},
    optional={"instructions": TEXT, "tools": st.lists(TOOL | st.just({"type": "web_search"}), max_size=2)},
)


def canonical(request: Json) -> bytes:
    return request_head(Endpoint.RESPONSES, request).canonical


def chat(request: Json) -> Any:
    """Return the chat that engines render, with neighbouring text parts joined."""

    def joined(content: Any) -> Any:
        if isinstance(content, str) or all(part["type"] == "text" for part in content):
            return content if isinstance(content, str) else "".join(part["text"] for part in content)
        return content

    messages = response_messages(request.get("instructions"), request["input"])
    return [{**m, "content": joined(m["content"])} for m in messages], response_tools(request.get("tools") or ())


@settings(max_examples=60)
@given(request=REQUEST, other=REQUEST)
def test_chats_that_are_equal_have_equal_bytes(request: Json, other: Json) -> None:
    for left, right in ((request, other), (request, parse_body(orjson.dumps(request)))):
        assert (canonical(left) == canonical(right)) == (chat(left) == chat(right))


@settings(max_examples=40)
@given(request=REQUEST, more=st.lists(ITEM, min_size=1, max_size=3))
def test_a_conversation_that_grows_grows_its_bytes(request: Json, more: list[Json]) -> None:
    assert canonical({**request, "input": [*request["input"], *more]}).startswith(canonical(request))


@settings(max_examples=40)
@given(request=REQUEST, words=TEXT)
def test_what_items_say_of_themselves_changes_no_key(request: Json, words: str) -> None:
    def told(item: Json) -> Json:
        named: Json = {} if item.get("type") == "item_reference" else {"id": words, "status": "completed"}
        if isinstance(item.get("content"), list):
            texts = ("input_text", "output_text")
            named["content"] = [
                {**part, "annotations": [], "logprobs": []} if part["type"] in texts else part
                for part in item["content"]
            ]
        return {**({"type": "message"} if "role" in item else {}), **item, **named}

    assert canonical({**request, "input": [told(item) for item in request["input"]]}) == canonical(request)


def test_a_chat_has_the_bytes_of_the_same_conversation_at_the_other_endpoint() -> None:
    function = {"name": "look", "description": "Look.", "parameters": {"type": "object"}}
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    here = {
        "instructions": "Be kind.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi."}]},
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "a cat"},
        ],
        "tools": [{"type": "function", **function}],
    }
    messages: list[Json] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "a cat", "tool_call_id": "c1"},
    ]
    there = {
        "messages": messages,
        "tools": [{"type": "function", "function": function}],
    }
    assert canonical(here) == request_head(Endpoint.CHAT, there).canonical
    text = {"instructions": "Be kind.", "input": "Hi."}
    assert canonical(text) == request_head(Endpoint.CHAT, {"messages": messages[:2]}).canonical


def test_media_are_counted_and_what_the_engine_keeps_has_no_keys() -> None:
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}
    assert request_head(Endpoint.RESPONSES, {"input": [image]}).media_parts == 1
    for kept in ({"previous_response_id": "resp_1"}, {"conversation": "conv_1"}, {"conversation": {"id": "conv_1"}}):
        head = request_head(Endpoint.RESPONSES, {"input": "and then?", **kept})
        assert (head.canonical, head.further_bytes) == (b"", len(canonical({"input": "and then?"})))
    assert kept_by_engine({"conversation": {"id": "conv_1"}}) == ("conversation", "conv_1")
    assert kept_by_engine({"previous_response_id": None, "conversation": None}) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": 1}, "input"),
        ({"input": [1]}, "input[0]"),
        ({"input": [{"type": 1}]}, "input[0].type"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 1}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [1]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call_output", "output": [1]}]}, "input[0].output[0]"),
        ({"input": "x", "instructions": []}, "instructions"),
        ({"input": "x", "tools": {}}, "tools"),
        ({"input": "x", "previous_response_id": 1}, "previous_response_id"),
        ({"input": "x", "previous_response_id": "i" * (MAX_ID_CHARS + 1)}, "previous_response_id"),
        ({"input": "x", "previous_response_id": "a", "conversation": "b"}, "previous_response_id"),
        ({"input": "x", "conversation": {}}, "conversation.id"),
        ({"input": "x", "conversation": {"id": 1}}, "conversation"),
    ],
)
def test_what_has_no_bytes_is_named(fields: Json, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        canonical(fields)
    assert caught.value.param == param


@settings(max_examples=60)
@given(st.recursive(st.none() | st.integers() | TEXT, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner)))
def test_hostile_values_are_refused_or_read(value: Any) -> None:
    message = {"type": "message", "role": "user", "content": value}
    for fields in ({"input": value}, {"input": [value]}, {"input": [message]}):
        with contextlib.suppress(BadRequest):
            assert isinstance(canonical(fields), bytes)
