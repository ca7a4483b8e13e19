"""What is rendered and what is read agree: each turn of a conversation with tools finds all of the last one cached."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.contract.events import Tier
from engine.contract.keys import key_seed, prefix_keys
from engine.contract.requests import Endpoint, request_head
from tests.engine.server.conftest import MODEL, Engine, Start
from tests.engine.server.tools.scripted import Scripted, all_marks, speak, tokenizer_with
from tests.engine.text.calls.templates import TEMPLATES
from tests.engine.text.calls.writers import SCHEMA, WRITERS

CHAT, MESSAGES, RESPONSES = Endpoint.CHAT, Endpoint.MESSAGES, Endpoint.RESPONSES
TURNS = 10
ARGUMENTS = {"city": 'Rome "old" \\ town, ünder the hills', "days": 3, "sure": True, "many": [1, {"a": None}]}
ASKED = "What about day {}? " + "Please look it up and tell me all that you can find. " * 8
RESULT = "It is {} degrees there. " + "The wind comes from the west and the sky is grey. " * 4
FUNCTION = {"name": "find", "description": "Finds.", "parameters": SCHEMA}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_with(all_marks())


def matched_keys(engine: Engine, endpoint: Endpoint, request: dict[str, Any]) -> tuple[int, int]:
    """Return how many leading keys of a request the engine holds, as a gateway counts them, and how many it has."""
    head = request_head(endpoint, request)
    keys = prefix_keys(head.canonical, key_seed(MODEL))
    held = set(engine.service.scheduler.held_keys()[Tier.GPU])
    return next((i for i, key in enumerate(keys) if key not in held), len(keys)), len(keys)


async def converse(engine: Engine, backend: Scripted, name: str, *, thinks: bool, compact: bool) -> None:
    """Hold a conversation whose every other answer is a call, and check that each request finds the last one."""
    writer = WRITERS[name]
    content = "Let me look." if writer.mixes else ""
    call = writer.write(content, [("find", ARGUMENTS)])
    final = writer.write("So it is.", [])
    thought = "<think>\nI must look.\n</think>\n\n" if thinks else ""
    messages: list[Any] = []
    known, keys_before = 0, 0
    for turn in range(TURNS):
        if turn % 2 == 0:
            messages.append({"role": "user", "content": ASKED.format(turn)})
        backend.answers.append(thought + (call if turn % 2 == 0 else final))
        request = {"model": MODEL, "messages": messages, "tools": [{"type": "function", "function": FUNCTION}]}
        matched, keys = matched_keys(engine, CHAT, request)
        assert matched >= keys_before, (turn, matched, keys_before)
        status, answer = await engine.ask(CHAT, **request, max_tokens=400)
        assert status == 200, answer
        usage, message = answer["usage"], answer["choices"][0]["message"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        # The last token of an answer ends it; its KV is not computed. A few tokens around may be split otherwise.
        assert cached >= known - 2, (turn, cached, known)
        assert turn == 0 or cached > 0
        known, keys_before = usage["prompt_tokens"] + usage["completion_tokens"], keys
        assert message.get("reasoning_content", "") == ("I must look." if thinks else "")
        if turn % 2 == 0:
            assert (message["content"] or "") == content
            assert answer["choices"][0]["finish_reason"] == "tool_calls"
            (made,) = message["tool_calls"]
            assert json.loads(made["function"]["arguments"]) == ARGUMENTS
            if compact:  # as clients in JavaScript write it
                made["function"]["arguments"] = json.dumps(ARGUMENTS, separators=(",", ":"), ensure_ascii=False)
            messages += [message, {"role": "tool", "content": RESULT.format(turn), "tool_call_id": made["id"]}]
        else:
            assert (message["content"], answer["choices"][0]["finish_reason"]) == ("So it is.", "stop")
            messages.append(message)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
async def test_ten_turns_with_tools_find_all_that_came_before(start: Start, tokenizer: Any, name: str) -> None:
    template, end = TEMPLATES[name]
    backend = Scripted(tokenizer, end)
    async with start(backend=backend) as engine:
        speak(engine, tokenizer, template, end)
        await converse(engine, backend, name, thinks=False, compact=False)
        assert not backend.answers


@pytest.mark.parametrize(("thinks", "compact"), [(True, False), (False, True)])
async def test_reasoning_and_arguments_written_anew_break_no_prefix(
    start: Start, tokenizer: Any, thinks: bool, compact: bool
) -> None:
    template, end = TEMPLATES["hermes"]
    backend = Scripted(tokenizer, end)
    async with start(backend=backend) as engine:
        speak(engine, tokenizer, template, end)
        await converse(engine, backend, "hermes", thinks=thinks, compact=compact)


async def test_arguments_are_rendered_as_the_model_wrote_them(start: Start, tokenizer: Any) -> None:
    """The model's own spaces come back, whatever the client makes of them, but only for the same tenant."""
    template, end = TEMPLATES["hermes"]
    backend = Scripted(tokenizer, end)
    asked = {"role": "user", "content": ASKED.format(1)}
    tools = [{"type": "function", "function": FUNCTION}]
    odd = '{"city":"Rome",  "days":3}'
    async with start(backend=backend) as engine:
        speak(engine, tokenizer, template, end)
        backend.answers.append(f'<tool_call>\n{{"name": "find", "arguments": {odd}}}\n</tool_call>')
        _, first = await engine.ask(CHAT, messages=[asked], tools=tools, max_tokens=99, cache_salt="a")
        message = first["choices"][0]["message"]
        assert message["tool_calls"][0]["function"]["arguments"] == odd
        message["tool_calls"][0]["function"]["arguments"] = '{"city": "Rome", "days": 3}'
        result = {"role": "tool", "content": "17", "tool_call_id": message["tool_calls"][0]["id"]}
        backend.answers += ["Fine.", "Fine."]
        cached = []
        for salt in ("a", "b"):
            again = {"messages": [asked, message, result], "tools": tools, "cache_salt": salt}
            _, second = await engine.ask(CHAT, **again, max_tokens=9)
            cached.append(second["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[0] >= first["usage"]["total_tokens"] - 2
        assert cached[1] == 0


async def test_ten_turns_of_messages_find_all_that_came_before(start: Start, tokenizer: Any) -> None:
    template, end = TEMPLATES["hermes"]
    backend = Scripted(tokenizer, end)
    call = WRITERS["hermes"].write("Let me look.", [("find", ARGUMENTS), ("find", {"days": 2})])
    tools = [{"name": "find", "description": "Finds.", "input_schema": SCHEMA}]
    messages: list[Any] = []
    known = keys_before = 0
    async with start(backend=backend) as engine:
        speak(engine, tokenizer, template, end)
        for turn in range(TURNS):
            if turn % 2 == 0:
                messages.append({"role": "user", "content": ASKED.format(turn)})
            said = call if turn % 2 == 0 else "So it is."
            backend.answers.append(f"<think>\nI must look.\n</think>\n\n{said}")
            request = {"model": MODEL, "messages": messages, "tools": tools, "max_tokens": 400}
            matched, keys = matched_keys(engine, MESSAGES, request)
            assert matched >= keys_before, (turn, matched, keys_before)
            status, answer = await engine.ask(MESSAGES, **request)
            assert status == 200, answer
            usage = answer["usage"]
            assert usage["cache_read_input_tokens"] >= known - 2, turn
            known = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"]
            keys_before = keys
            kinds = [block["type"] for block in answer["content"]]
            messages.append({"role": "assistant", "content": answer["content"]})
            if turn % 2:
                assert (kinds, answer["stop_reason"]) == (["thinking", "text"], "end_turn")
                continue
            assert (kinds, answer["stop_reason"]) == (["thinking", "text", "tool_use", "tool_use"], "tool_use")
            assert answer["content"][2]["input"] == ARGUMENTS
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": RESULT.format(turn)}
                for block in answer["content"][2:]
            ]
            messages.append({"role": "user", "content": results})


async def test_ten_turns_of_responses_find_all_that_came_before(start: Start, tokenizer: Any) -> None:
    template, end = TEMPLATES["hermes"]
    backend = Scripted(tokenizer, end)
    call = WRITERS["hermes"].write("Let me look.", [("find", ARGUMENTS), ("find", {"days": 2})])
    items: list[Any] = []
    known = keys_before = 0
    async with start(backend=backend) as engine:
        speak(engine, tokenizer, template, end)
        for turn in range(TURNS):
            if turn % 2 == 0:
                items.append({"role": "user", "content": ASKED.format(turn)})
            said = call if turn % 2 == 0 else "So it is."
            backend.answers.append(f"<think>\nI must look.\n</think>\n\n{said}")
            request = {"model": MODEL, "input": items, "tools": [{"type": "function", **FUNCTION}]}
            matched, keys = matched_keys(engine, RESPONSES, request)
            assert matched >= keys_before, (turn, matched, keys_before)
            status, answer = await engine.ask(RESPONSES, **request, max_output_tokens=400)
            assert status == 200, answer
            usage = answer["usage"]
            assert usage["input_tokens_details"]["cached_tokens"] >= known - 2, turn
            assert usage["output_tokens_details"]["reasoning_tokens"] > 0
            known, keys_before = usage["total_tokens"], keys
            kinds = [item["type"] for item in answer["output"]]
            items += answer["output"]
            assert kinds == ["reasoning", "message"] + ["function_call"] * (2 if turn % 2 == 0 else 0)
            items += [
                {"type": "function_call_output", "call_id": item["call_id"], "output": RESULT.format(turn)}
                for item in answer["output"]
                if item["type"] == "function_call"
            ]
