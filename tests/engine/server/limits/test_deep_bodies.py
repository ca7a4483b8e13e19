"""Values nested as deeply as JSON can be read, and deeper than Python can write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
import pytest

from engine.server.fields import Body, ChatFields, CompletionFields
from engine.server.message_fields import MessagesFields
from engine.server.response_requests import ResponsesFields
from tests.engine.server.conftest import Engine

HI = {"role": "user", "content": "hi"}
WHOLE: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [HI], "max_tokens": 1},
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/messages": {"messages": [HI], "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
}
FIELDS: Mapping[str, type[Body]] = {
    "/v1/chat/completions": ChatFields,
    "/v1/completions": CompletionFields,
    "/v1/messages": MessagesFields,
    "/v1/responses": ResponsesFields,
}
DEEP = "deep"
"""Stands for a deeply nested value."""
PLACES: list[tuple[str, dict[str, Any]]] = [
    *((path, {name: DEEP}) for path, kind in FIELDS.items() for name in (*kind.model_fields, "store", "other")),
    ("/v1/chat/completions", {"messages": [{"role": DEEP, "content": "hi"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": DEEP}]}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": DEEP}]}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": DEEP}]}]}),
    ("/v1/responses", {"input": [{"type": DEEP, "role": "user", "content": "hi"}]}),
    ("/v1/responses", {"input": [{"role": DEEP, "content": "hi"}]}),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": DEEP}]}]}),
]


@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}")])
@pytest.mark.parametrize("depth", [253, 600, 1000])
async def test_a_deeply_nested_value_anywhere_is_answered(engine: Engine, depth: int, begin: str, end: str) -> None:
    """253 levels can be written by themselves, but not inside an answer."""
    nested = (begin * depth + "1" + end * depth).encode()
    wrong = []
    for path, change in PLACES:
        for more in ({}, {"stream": True}):
            body = orjson.dumps({**WHOLE[path], **more, **change}).replace(orjson.dumps(DEEP), nested)
            async with engine.http.post(engine.url + path, data=body) as response:
                said = await response.read()
                if response.status not in (200, 400, 404) or not said or b'"internal' in said:
                    wrong.append((path, change, more, response.status, said[:200]))
    assert not wrong
    assert engine.held_blocks() == 0
