"""Calls and reasoning in the three APIs, whole and streamed, as the official clients read them."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from engine.common.sse import SseDecoder
from engine.model.checkpoint import CHAT_TEMPLATE
from tests.engine.server.conftest import MODEL, Engine, Start
from tests.engine.server.tools.scripted import Scripted, all_marks, speak, tokenizer_with
from tests.engine.text.calls.templates import TEMPLATES
from tests.engine.text.calls.writers import SCHEMA, WRITERS, Call

FUNCTION = {"name": "find", "description": "Finds.", "parameters": SCHEMA}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
CALLS: list[Call] = [
    ("find", {"city": 'Rom "x"\n</tool_call>', "days": 3}),
    ("get_weather", {}),
    ("find", {"deep": {"ä": [1]}}),
]
ASKED: Any = [{"role": "user", "content": "What is the weather?"}]
THOUGHT = "The user wants the weather.\nI must look."
SAID = "Let me look."
WRITTEN = f"<think>\n{THOUGHT}\n</think>\n\n" + WRITERS["hermes"].write(SAID, CALLS)


class Model(NamedTuple):
    """An engine whose model says what the test wants."""

    engine: Engine
    device: Scripted
    chat: AsyncOpenAI
    messages: AsyncAnthropic

    def says(self, text: str, seed: int | None = None) -> None:
        """The next answer. `seed`: its tokens are those of pieces that end anywhere."""
        tokenizer = self.engine.service.model.tokenizer
        if seed is None:
            self.device.answers.append(text)
            return
        places = sorted(random.Random(seed).choices(range(len(text)), k=len(text) // 3))
        pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
        ids = [one for piece in pieces for one in tokenizer.encode(piece, add_special_tokens=False).ids]
        self.device.answers.append(ids)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_with(all_marks())


@pytest.fixture
async def model(start: Start, tokenizer: Any) -> AsyncIterator[Model]:
    device = Scripted(tokenizer, "<|im_end|>")
    async with (
        start(backend=device) as engine,
        AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as chat,
        AsyncAnthropic(base_url=engine.url, api_key="none", max_retries=0) as messages,
    ):
        speak(engine, tokenizer, CHAT_TEMPLATE, "<|im_end|>")
        yield Model(engine, device, chat, messages)


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls]


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
async def test_a_chat_says_the_same_whole_and_streamed(model: Model, seed: int | None) -> None:
    request: dict[str, Any] = {"model": MODEL, "messages": ASKED, "tools": TOOLS, "max_tokens": 400}
    model.says(WRITTEN)
    whole = (await model.chat.chat.completions.create(**request)).choices[0]
    assert (whole.message.content, whole.finish_reason) == (SAID, "tool_calls")
    assert whole.message.model_dump()["reasoning_content"] == THOUGHT
    assert calls_of(whole.message) == CALLS
    assert len({one.id for one in whole.message.tool_calls or ()}) == 3
    model.says(WRITTEN, seed)
    content, thought, finish = "", "", None
    calls: list[dict[str, str]] = []
    pieces = 0
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    async for chunk in await model.chat.chat.completions.create(**request, **options):
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            content += choice.delta.content or ""
            thought += choice.delta.model_dump().get("reasoning_content") or ""
            for one in choice.delta.tool_calls or ():
                assert one.function is not None
                if one.id is not None:
                    assert (one.index, one.type, one.function.arguments) == (len(calls), "function", "")
                    calls.append({"id": one.id, "name": one.function.name or "", "arguments": ""})
                else:
                    calls[one.index]["arguments"] += one.function.arguments or ""
                    pieces += 1
        if chunk.usage is not None:
            assert chunk.usage.completion_tokens_details is not None
            assert 5 < (chunk.usage.completion_tokens_details.reasoning_tokens or 0) < chunk.usage.completion_tokens
    assert (content, thought, finish) == (SAID, THOUGHT, "tool_calls")
    made: Any = whole.message.tool_calls
    assert [(one["name"], one["arguments"]) for one in calls] == [
        (one.function.name, one.function.arguments) for one in made
    ]
    assert len({one["id"] for one in calls}) == 3
    assert pieces > 6  # the arguments came as they were made


async def test_the_stream_helpers_of_the_client_read_the_calls(model: Model) -> None:
    model.says(WRITTEN)
    async with model.chat.chat.completions.stream(model=MODEL, messages=ASKED, tools=TOOLS) as stream:
        final = (await stream.get_final_completion()).choices[0].message
    assert (final.content, calls_of(final)) == (SAID, CALLS)


async def test_only_one_call_if_the_client_wants_no_more(model: Model) -> None:
    request: dict[str, Any] = {"model": MODEL, "messages": ASKED, "tools": TOOLS, "parallel_tool_calls": False}
    for stream in (False, True):
        model.says(WRITTEN)
        if not stream:
            answer = await model.chat.chat.completions.create(**request)
            choice = answer.choices[0]
            assert (calls_of(choice.message), choice.finish_reason) == (CALLS[:1], "tool_calls")
            assert answer.usage is not None
            assert (
                answer.usage.completion_tokens
                < len(model.engine.service.model.tokenizer.encode(WRITTEN, add_special_tokens=False).ids) - 10
            )
        else:
            async with model.chat.chat.completions.stream(**request) as events:
                final = (await events.get_final_completion()).choices[0]
            assert (calls_of(final.message), final.finish_reason) == (CALLS[:1], "tool_calls")
    model.says(WRITTEN)
    wanted: dict[str, Any] = {
        "tools": [{"name": "find", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    }
    said = await model.messages.messages.create(
        model=MODEL,
        messages=ASKED,
        max_tokens=400,
        **wanted,
    )
    assert [block.type for block in said.content] == ["thinking", "text", "tool_use"]


async def test_without_a_choice_of_tools_an_answer_is_text(model: Model) -> None:
    call = WRITERS["hermes"].write(SAID, CALLS)
    bare = call.replace("<tool_call>", "").replace("</tool_call>", "")  # special tokens, which are no text
    for more in ({"tools": TOOLS, "tool_choice": "none"}, {}):
        model.says(call)
        status, answer = await model.engine.ask("/v1/chat/completions", messages=ASKED, max_tokens=400, **more)
        choice = answer["choices"][0]
        assert (status, choice["message"]["content"], choice["finish_reason"]) == (200, bare, "stop")
        assert "tool_calls" not in choice["message"]


async def test_an_answer_that_ends_within_a_call_keeps_its_reason(model: Model) -> None:
    model.says(WRITERS["hermes"].write("", [("find", {"city": "Rome " * 50})]))
    answer = await model.chat.chat.completions.create(model=MODEL, messages=ASKED, tools=TOOLS, max_tokens=40)
    choice = answer.choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.arguments.startswith('{"city": "Rome Rome')
    model.says("<tool_call>find it</tool_call>")
    answer = await model.chat.chat.completions.create(model=MODEL, messages=ASKED, tools=TOOLS, max_tokens=40)
    assert answer.choices[0].message.content == "<tool_call>find it</tool_call>"
    assert answer.choices[0].finish_reason == "stop"


async def test_tools_without_a_known_format_name_the_flag(model: Model, tokenizer: Any) -> None:
    speak(model.engine, tokenizer, "{{ tools | tojson }}{{ messages[0].content }}", "<|im_end|>")
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": ASKED, "tools": TOOLS}),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **FUNCTION}]}),
        ("/v1/messages", {"messages": ASKED, "max_tokens": 9, "tools": [{"name": "find", "input_schema": SCHEMA}]}),
    ]
    for path, request in requests:
        status, answer = await model.engine.ask(path, **request)
        assert (status, "--tool-call-parser" in answer["error"]["message"]) == (400, True), answer


@pytest.mark.parametrize("seed", [None, 4])
async def test_messages_say_the_same_whole_and_streamed(model: Model, seed: int | None) -> None:
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": ASKED,
        "tools": [{"name": one, "input_schema": SCHEMA} for one in ("find", "get_weather")],
        "max_tokens": 400,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    model.says(WRITTEN)
    whole = await model.messages.messages.create(**request)
    model.says(WRITTEN, seed)
    async with model.messages.messages.stream(**request) as stream:
        names = [event.type async for event in stream]
        final = await stream.get_final_message()
    for message in (whole, final):
        assert message.stop_reason == "tool_use"
        content = [block.model_dump(exclude={"id", "caller", "parsed_output"}) for block in message.content]
        assert content[0] == {"type": "thinking", "thinking": THOUGHT, "signature": ""}
        assert (content[1]["type"], content[1]["text"]) == ("text", SAID)
        assert [(one["name"], one["input"]) for one in content[2:]] == CALLS
    assert names.count("content_block_start") == names.count("content_block_stop") == 5
    assert names.count("input_json") > 4


async def test_reasoning_is_turned_off_by_the_template(model: Model) -> None:
    counts = [
        (await model.messages.messages.count_tokens(model=MODEL, messages=ASKED, **more)).input_tokens
        for more in ({}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"thinking": {"type": "disabled"}})
    ]
    assert counts[0] == counts[1] < counts[2]  # the template writes empty marks


async def test_responses_say_the_same_whole_and_streamed(model: Model) -> None:
    request: dict[str, Any] = {"model": MODEL, "input": ASKED, "tools": [{"type": "function", **FUNCTION}]}
    model.says(WRITTEN)
    whole = await model.chat.responses.create(**request)
    model.says(WRITTEN, 5)
    kinds: list[str] = []
    arguments: dict[str, str] = {}
    async for event in await model.chat.responses.create(**request, stream=True):
        assert event.sequence_number == len(kinds)
        kinds.append(event.type)
        if event.type == "response.function_call_arguments.delta":
            arguments[event.item_id] = arguments.get(event.item_id, "") + event.delta
        elif event.type == "response.completed":
            last = event.response
    for response in (whole, last):
        assert response.output_text == SAID
        assert [item.type for item in response.output] == ["reasoning", "message", *["function_call"] * 3]
        thought: Any = response.output[0]
        assert thought.content[0].text == THOUGHT
        made: Any = response.output[2:]
        assert [(one.name, json.loads(one.arguments)) for one in made] == CALLS
        assert len({one.call_id for one in made}) == len({one.id for one in made}) == 3
        assert {one.status for one in made} == {"completed"}
    assert arguments == {one.id: one.arguments for one in last.output[2:] if one.type == "function_call"}
    told = [kind.removeprefix("response.") for kind in kinds]
    short = [kind for i, kind in enumerate(told) if not kind.endswith(".delta") or told[i - 1] != kind]
    part = ["output_item.added", "content_part.added"]
    done = ["content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert short == [
        "created",
        "in_progress",
        *(*part, "reasoning_text.delta", "reasoning_text.done", *done),
        *(*part, "output_text.delta", "output_text.done", *done),
        *call * 3,
        "completed",
    ]


async def test_harmony_reaches_the_client_too(start: Start, tokenizer: Any) -> None:
    template, end = TEMPLATES["openai"]
    device = Scripted(tokenizer, end)
    async with start(backend=device) as engine:
        speak(engine, tokenizer, template, end)
        device.answers.append(
            "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant" + WRITERS["openai"].write(SAID, CALLS[:1])
        )
        fields = {"messages": ASKED, "tools": TOOLS, "stream": True, "reasoning_effort": "high"}
        async with engine.post("/v1/chat/completions", **fields) as response:
            assert "warning" not in response.headers
            events = [json.loads(one) for one in SseDecoder().feed(await response.read()) if one != b"[DONE]"]
    deltas = [one["choices"][0]["delta"] for one in events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Look."
    assert "".join(delta.get("content") or "" for delta in deltas) == SAID
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
