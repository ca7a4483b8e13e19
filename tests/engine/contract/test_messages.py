"""Requests to `/v1/messages` are read as equivalent chats, with prefix keys."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.errors import ApiError, BadRequest, TooManyRequests, Unavailable
from engine.contract.message_errors import error_body
from engine.contract.messages import chat_messages, chat_tools
from engine.contract.requests import Endpoint, parse_body, request_head

Json = dict[str, Any]
TEXT = st.text(max_size=30)
MARK = {"type": "ephemeral", "ttl": "1h"}
TEXT_BLOCK = TEXT.map(lambda text: {"type": "text", "text": text})
CALL = st.builds(
    lambda n, text: {"type": "tool_use", "id": f"t{n}", "name": "f", "input": {"q": text}}, st.integers(0, 9), TEXT
)
RESULT = st.builds(
    lambda n, content: {"type": "tool_result", "tool_use_id": f"t{n}", "content": content},
    st.integers(0, 9),
    TEXT | st.lists(TEXT_BLOCK, max_size=2),
)
IMAGE = TEXT.map(lambda data: {"type": "image", "source": {"type": "base64", "data": data}})
TURN = st.one_of(
    st.fixed_dictionaries(
        {"role": st.just("user"), "content": TEXT | st.lists(TEXT_BLOCK | RESULT | IMAGE, min_size=1, max_size=3)}
    ),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": TEXT | st.lists(TEXT_BLOCK | CALL, min_size=1, max_size=3)}
    ),
)
TOOL = TEXT.map(lambda text: {"name": "f", "description": text, "input_schema": {"type": "object"}})
REQUEST = st.fixed_dictionaries(
    {"messages": st.lists(TURN, min_size=1, max_size=4)},
    optional={"system": TEXT | st.lists(TEXT_BLOCK, max_size=2), "tools": st.lists(TOOL, max_size=2)},
)


def canonical(request: Json) -> bytes:
    return request_head(Endpoint.MESSAGES, request).canonical


def marked(value: Any, draw: st.DataObject) -> Any:
    """Return the same request with cache marks on some of its blocks and tools, at any depth that the API allows."""
    if isinstance(value, list):
        return [marked(one, draw) for one in value]
    if not isinstance(value, dict):
        return value
    out = {
        name: marked(one, draw) if name in ("messages", "system", "tools", "content") else one
        for name, one in value.items()
    }
    if ("type" in value or "input_schema" in value) and draw.draw(st.booleans()):
        out["cache_control"] = MARK
    return out


@settings(max_examples=40)
@given(request=REQUEST, data=st.data())
def test_marks_change_no_key(request: Json, data: st.DataObject) -> None:
    assert canonical(marked(request, data)) == canonical(request)


@settings(max_examples=40)
@given(request=REQUEST, more=TURN)
def test_a_conversation_that_grows_grows_its_bytes(request: Json, more: Json) -> None:
    grown = {**request, "messages": [*request["messages"], more]}
    assert canonical(grown).startswith(canonical(request))


@settings(max_examples=40)
@given(request=REQUEST, other=REQUEST)
def test_equal_bytes_are_equal_chats(request: Json, other: Json) -> None:
    """Texts here contain none of the separators, so chats that are rendered differently have different bytes."""

    def chat(one: Json) -> Any:
        messages = chat_messages(one.get("system"), one["messages"])
        return [{**m, "content": joined(m["content"])} for m in messages], chat_tools(one.get("tools") or ())

    def joined(content: Any) -> Any:
        """Join neighbouring text parts."""
        if isinstance(content, str) or all(part["type"] == "text" for part in content):
            return content if isinstance(content, str) else "".join(part["text"] for part in content)
        return content

    if "\x1e" in repr(request) or "\x1f" in repr(request):
        return
    for left, right in ((request, other), (request, parse_body(orjson.dumps(request)))):
        assert (canonical(left) == canonical(right)) == (chat(left) == chat(right))


def test_the_chat_that_a_request_stands_for() -> None:
    messages = [
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look.", "citations": []},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "é"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "a", "cache_control": MARK}],
                },
                {"type": "tool_result", "tool_use_id": "t2"},
                {"type": "text", "text": "Well?"},
            ],
        },
    ]
    assert chat_messages([{"type": "text", "text": "Be kind."}], messages) == [
        {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "I look."}],
            "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"at":"é"}'}}],
        },
        {"role": "tool", "content": [{"type": "text", "text": "a"}], "tool_call_id": "t1"},
        {"role": "tool", "content": "", "tool_call_id": "t2"},
        {"role": "user", "content": [{"type": "text", "text": "Well?"}]},
    ]
    tools = [
        {"name": "look", "input_schema": {"type": "object"}, "cache_control": MARK},
        {"type": "bash_20250124", "name": "bash"},
    ]
    assert chat_tools(tools) == [
        {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},
        {"type": "bash_20250124", "name": "bash"},
    ]


def test_a_chat_has_the_bytes_of_the_same_conversation_at_the_other_endpoint() -> None:
    here = {"system": "Be kind.", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi."}]}]}
    there = {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi."}]}
    assert canonical(here) == request_head(Endpoint.CHAT, there).canonical


@pytest.mark.parametrize(
    ("request_fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "x"}], "system": 1}, "system"),
        ({"messages": [{"role": "user", "content": "x"}], "system": ["x"]}, "system[0]"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": {}}, "tools"),
    ],
)
def test_what_has_no_bytes_is_named(request_fields: Json, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        canonical(request_fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BadRequest("x"), None, "invalid_request_error"),
        (BadRequest("x"), 401, "authentication_error"),
        (BadRequest("x"), 405, "invalid_request_error"),
        (TooManyRequests("x"), None, "rate_limit_error"),
        (Unavailable("x"), None, "overloaded_error"),
        (ApiError("x"), None, "api_error"),
        (ApiError("x"), 502, "api_error"),
        (ApiError("x"), 504, "timeout_error"),
    ],
)
def test_errors_have_the_types_of_the_api(error: ApiError, status: int | None, kind: str) -> None:
    assert parse_body(error_body(error, status)) == {"type": "error", "error": {"type": kind, "message": "x"}}
    coded = parse_body(error_body(BadRequest("x", code="answer_complete"), request_id="7"))
    assert (coded["error"]["details"], coded["request_id"]) == ({"error_code": "answer_complete"}, "7")
