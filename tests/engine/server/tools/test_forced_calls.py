"""A demanded call is made, in every format, by a model that samples at random."""

from __future__ import annotations

from typing import Any

import jsonschema
import orjson
import pytest

from engine.model.checkpoint import CHAT_TEMPLATE
from tests.engine.server.conftest import Engine
from tests.engine.server.tools.scripted import speak
from tests.engine.text.calls.templates import TEMPLATES

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "sure": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Finds.", "parameters": SCHEMA}}
    for name in ("find", "look")
]
_NO_THOUGHT: dict[str, Any] = {"seed": 1, "chat_template_kwargs": {"enable_thinking": False}}
ASKED = [{"role": "user", "content": "What is the weather?"}]


@pytest.mark.parametrize("name", sorted(TEMPLATES))
async def test_a_demanded_call_is_made_in_every_format(engine: Engine, name: str) -> None:
    template = TEMPLATES[name][0].replace("think>", "thought>")  # a random model would think without an end
    speak(engine, engine.service.model.tokenizer, template, "<|im_end|>")
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        for seed in range(3):
            more = {"tool_choice": choice, "max_tokens": 900, "seed": seed, "parallel_tool_calls": seed == 0}
            status, answer = await engine.ask("/v1/chat/completions", messages=ASKED, tools=TOOLS, **more)
            assert status == 200, answer
            said = answer["choices"][0]
            if name == "openai" and said["finish_reason"] == "length":  # a random model thinks without an end
                assert said["message"]["reasoning_content"]
                assert not said["message"]["content"]
                continue
            assert said["finish_reason"] == "tool_calls", (answer, choice)
            calls: list[Any] = said["message"]["tool_calls"]
            for call in calls:
                jsonschema.validate(orjson.loads(call["function"]["arguments"]), SCHEMA)
            allowed = {"find", "look"} if choice == "required" else {"look"}
            assert {call["function"]["name"] for call in calls} <= allowed
            assert seed == 0 or len(calls) == 1


async def test_the_other_apis_demand_calls_too(engine: Engine) -> None:
    speak(engine, engine.service.model.tokenizer, CHAT_TEMPLATE, "<|im_end|>")
    tools: list[Any] = [{"name": "find", "input_schema": SCHEMA}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "find"}):
        status, said = await engine.ask(
            "/v1/messages", messages=ASKED, tools=tools, tool_choice=choice, max_tokens=900, **_NO_THOUGHT
        )
        assert (status, said["stop_reason"]) == (200, "tool_use"), said
        jsonschema.validate(said["content"][-1]["input"], SCHEMA)
    tools = [{"type": "function", "name": "find", "parameters": SCHEMA}]
    for wish in ("required", {"type": "function", "name": "find"}):
        status, said = await engine.ask("/v1/responses", input="hi", tools=tools, tool_choice=wish, **_NO_THOUGHT)
        assert (status, said["status"], said["output"][-1]["type"]) == (200, "completed", "function_call"), said
        jsonschema.validate(orjson.loads(said["output"][-1]["arguments"]), SCHEMA)


async def test_a_call_and_another_form_exclude_each_other(engine: Engine) -> None:
    status, answer = await engine.ask(
        "/v1/chat/completions",
        messages=ASKED,
        tools=TOOLS,
        tool_choice="required",
        response_format={"type": "json_object"},
    )
    assert (status, answer["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("name", sorted(TEMPLATES))
async def test_odd_schemas_are_followed_or_refused_by_name(engine: Engine, name: str) -> None:
    speak(engine, engine.service.model.tokenizer, TEMPLATES[name][0], "<|im_end|>")
    deep: Any = {}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}}
    for odd in ({"properties": [1]}, {"properties": {"a": True, "b": 3}}, {"required": "a"}, {"type": "array"}, deep):
        tools = [{"type": "function", "function": {"name": "f", "parameters": odd}}]
        status, answer = await engine.ask(
            "/v1/chat/completions", messages=ASKED, tools=tools, tool_choice="required", max_tokens=40
        )
        assert status in (200, 400), answer
        assert status == 200 or answer["error"]["param"] in ("tools", "tool_choice", "messages"), answer
