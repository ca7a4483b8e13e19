"""Bodies with very many or very long names: no error costs more than the body."""

from __future__ import annotations

import io
import time
from typing import Any

import orjson
import pytest

from engine.contract.errors import BadRequest
from engine.contract.requests import MAX_LISTED
from engine.server.fields import MAX_ENTRIES, parse_fields
from tests.engine.server.conftest import Engine
from tests.engine.server.limits.test_deep_bodies import FIELDS, HI, WHOLE


@pytest.mark.parametrize("path", list(FIELDS))
def test_a_body_of_a_million_names_is_refused_at_the_first(path: str) -> None:
    """pydantic would describe each of them, and for ten seconds no other thread would run."""
    body = {**WHOLE[path], **{f"k{i}": 0 for i in range(1_000_000)}}
    began_s = time.process_time()
    with pytest.raises(BadRequest, match="k0 is not a field of this endpoint"):
        parse_fields(FIELDS[path], body)
    assert time.process_time() - began_s < 2


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "logit_bias"),
        ("/v1/chat/completions", "stream_options"),
        ("/v1/messages", "cache_control"),
        ("/v1/responses", "metadata"),
    ],
)
async def test_an_object_in_a_field_has_a_bound(engine: Engine, path: str, name: str) -> None:
    fields = {**WHOLE[path], name: {str(i): "x" for i in range(MAX_ENTRIES + 1)}}
    status, answer = await engine.ask(path, **fields)
    assert (status, answer["error"]["message"]) == (400, f"{name} has 1025 entries; at most 1024 are read")


@pytest.mark.parametrize("path", [*FIELDS, "/tokenize"])
async def test_a_name_of_megabytes_is_cut(engine: Engine, path: str) -> None:
    name = "the " * 200_000
    for change in ({name: 1}, {"messages": [{**HI, name: 1}]}, {"input": [{**HI, name: 1}]}):
        async with engine.post(path, **{**WHOLE.get(path, {}), **change}) as response:
            assert response.status == 400
            assert len(await response.read()) < 5000


PART = {"type": "text", "text": "x"}
CALL = {"function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
MANY = MAX_LISTED + 1
LISTS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": [HI] * MANY}, "messages"),
    ("/v1/chat/completions", {"messages": [{**HI, "content": [PART] * MANY}]}, "messages[0].content"),
    ("/v1/chat/completions", {"messages": [{**HI, "tool_calls": [CALL] * MANY}]}, "messages[0].tool_calls"),
    ("/v1/chat/completions", {"messages": [HI], "tools": [TOOL] * MANY}, "tools"),
    ("/v1/messages", {"messages": [HI] * MANY, "max_tokens": 1}, "messages"),
    ("/v1/messages", {"messages": [{**HI, "content": [PART] * MANY}], "max_tokens": 1}, "messages[0].content"),
    ("/v1/messages", {"messages": [HI], "system": [PART] * MANY, "max_tokens": 1}, "system"),
    ("/v1/messages/count_tokens", {"messages": [HI] * MANY}, "messages"),
    ("/v1/responses", {"input": [{**HI, "content": [{**PART, "type": "input_text"}] * MANY}]}, "input[0].content"),
    ("/tokenize", {"messages": [HI] * MANY}, "messages"),
    ("/tokenize", {"messages": [HI], "tools": [TOOL] * MANY}, "tools"),
]


@pytest.mark.parametrize(("path", "fields", "where"), LISTS)
async def test_lists_have_a_bound(engine: Engine, path: str, fields: dict[str, Any], where: str) -> None:
    async with engine.http.post(engine.url + path, data=io.BytesIO(orjson.dumps(fields))) as response:
        status, answer = response.status, orjson.loads(await response.read())
    assert (status, answer["error"]["message"]) == (400, f"{where} has 16385 entries; at most 16384 are read")
