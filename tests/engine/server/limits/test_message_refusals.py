"""Which fields `/v1/messages` refuses by name and which it takes; and any JSON in any field."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.server.message_fields import MessagesFields
from tests.engine.server.conftest import Engine
from tests.engine.server.limits.test_fuzz import FLAG, JSON, TEXT, VALID, Client
from tests.engine.server.limits.test_fuzz import client as client

HI = {"role": "user", "content": "hi"}
MARK = {"type": "ephemeral"}


def blocks(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


def text(**more: Any) -> dict[str, Any]:
    return {"type": "text", "text": "hi", **more}


USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
TOOL = {"name": "f", "input_schema": {}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [3]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages[0].name"),
    ({"system": 3}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    (blocks("x"), "messages[0].content[0]"),
    (blocks({"type": "image", "source": {}}), "messages[0].content[0].type"),
    (blocks({"type": "tool_result", "tool_use_id": 1}), "messages[0].content[0].tool_use_id"),
    (
        blocks({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}),
        "messages[0].content[0].content[0].type",
    ),
    (blocks({"type": "thinking", "thinking": "a"}), "messages[0].content[0].type"),
    ({"messages": [HI, {"role": "assistant", "content": [USE]}]}, "messages"),
    ({"messages": [HI, {"role": "assistant", "content": [{**USE, "input": 3}]}]}, "messages[1].content[0].input"),
    (blocks(text(), {"type": "tool_use", "id": "1", "name": "f", "input": {}}), "messages[0].content[1].type"),
    (blocks(text(text=3)), "messages[0].content[0].text"),
    (blocks(text(bold=True)), "messages[0].content[0].bold"),
    (blocks(text(cache_control={"type": "forever"})), "messages[0].content[0].cache_control.type"),
    (blocks(text(cache_control={"type": "ephemeral", "ttl": "2h"})), "messages[0].content[0].cache_control.ttl"),
    (blocks(*[text(cache_control=MARK)] * 5), "cache_control"),
    ({"cache_control": {"type": "ephemeral", "ttl": 5}}, "cache_control.ttl"),
    ({"stop_sequences": ["a", ""]}, "stop_sequences[1]"),
    ({"stop": ["a"]}, "stop"),
    ({"n": 2}, "n"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    ({"thinking": {"type": "enabled", "budget_tokens": -2}}, "thinking.budget_tokens"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
]
TAKEN: list[dict[str, Any]] = [
    {"tools": [], "tool_choice": {"type": "none"}, "thinking": {"type": "disabled"}, "container": None},
    {"metadata": {"user_id": "me"}, "service_tier": "auto", "stop_sequences": None, "temperature": 0, "top_k": 4},
    {"service_tier": "flex", "store": True},
    {"system": [text(cache_control=None, citations=[])], "messages": [HI, {"role": "assistant", "content": "a"}]},
    {"messages": [HI, HI, {"role": "system", "content": "be brief"}, HI]},
    blocks(*[text(cache_control=MARK)] * 4),
]


async def test_what_is_refused_is_named(engine: Engine) -> None:
    for change, param in REFUSED:
        request = {"messages": [HI], "max_tokens": 1, **change}
        status, answer = await engine.ask("/v1/messages", **request)
        assert (status, answer["type"]) == (400, "error"), (change, answer)
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["error"]["message"].startswith(param), (change, answer)
    assert engine.held_blocks() == 0


async def test_what_asks_for_nothing_is_taken(engine: Engine) -> None:
    for change in TAKEN:
        status, answer = await engine.ask("/v1/messages", **{"messages": [HI], "max_tokens": 1, **change})
        assert status == 200, (change, answer)


async def test_other_errors_have_the_same_shape(engine: Engine) -> None:
    async with engine.http.get(f"{engine.url}/v1/messages") as response:
        assert (response.status, (await response.json())["type"]) == (405, "error")
    status, answer = await engine.ask("/v1/messages/count_tokens", messages=[HI], max_tokens=3)
    assert (status, answer["type"]) == (400, "error")
    status, answer = await engine.ask("/v1/chat/completions", messages=[])
    assert "type" not in answer


async def test_an_id_that_is_no_text_does_not_spoil_an_error(engine: Engine) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.ports.clients)
    head = "POST /v1/messages HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: a\xff\xe9\r\n"
    writer.write(f"{head}Content-Length: 2\r\n\r\n{{}}".encode("latin-1"))
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert orjson.loads(answer.partition(b"\r\n\r\n")[2])["request_id"] == "a??"


BLOCKS = st.lists(TEXT.map(lambda one: {"type": "text", "text": one, "cache_control": MARK}), max_size=2)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXT | BLOCKS})
OURS = {
    **VALID,
    "messages": st.lists(MESSAGE, min_size=1, max_size=4),
    "max_tokens": st.integers(0, 4),
    "system": TEXT | BLOCKS,
    "stop_sequences": st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "cache_control": st.just(MARK),
}


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Valid fields; in half of the bodies one field has an arbitrary value."""
    needed = ["max_tokens", "messages"]
    optional = sorted(OURS.keys() & MessagesFields.model_fields.keys() - {*needed})
    names = needed + draw(st.lists(st.sampled_from(optional), max_size=5, unique=True))
    body = {name: draw(OURS[name]) for name in names}
    if draw(FLAG):
        body[draw(st.sampled_from([*sorted(MessagesFields.model_fields), "unknown"]))] = draw(JSON)
    return body


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(body=bodies())
def test_any_body_has_an_answer(client: Client, body: dict[str, Any]) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        status, answer = client.post(path, orjson.dumps(body))
        assert status in (200, 400, 404), (status, answer)
        if answer.startswith(b"event: "):
            assert b"event: message_stop\n" in answer
        else:
            assert orjson.loads(answer).get("type", "message") in ("message", "error")
