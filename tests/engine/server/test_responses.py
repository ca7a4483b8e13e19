"""`/v1/responses` of one engine: the official client, refusals by name, and prefix keys shared with chats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import openai
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI

from engine.backend.sim import SimBackend
from engine.common.sse import SseDecoder
from engine.sched.plan import StepPlan, StepResult
from engine.server.response_requests import ResponsesFields
from engine.text.chat import ChatTemplate
from engine.text.rendering import ChatRenderer
from tests.engine.server.conftest import FAST, MODEL, Engine, Start
from tests.engine.server.limits.test_fuzz import JSON, Client
from tests.engine.server.limits.test_fuzz import client as client

PATH = "/v1/responses"
SYSTEM = "You are a helpful assistant who knows the deployment well. " * 12
HI = {"role": "user", "content": "hi"}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [3]}, "input[0]"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": 3}]}, "input[0].output"),
    ({"input": [{"type": "reasoning", "summary": [{"type": "summary_text"}]}]}, "input[0].summary[0].text"),
    ({"input": [{"type": "reasoning", "depth": 3}]}, "input[0].depth"),
    ({"input": [HI, {"type": "item_reference", "id": "x"}]}, "input[1].type"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{**HI, "name": "me"}]}, "input[0].name"),
    ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 3}]}]}, "input[0].content[0].text"),
    ({"instructions": 3}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"text": {"format": "json"}}, "text.format"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format.schema"),
    ({"text": {"verbosity": 3}}, "text.verbosity"),
    ({"reasoning": {"depth": "low"}}, "reasoning.depth"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"max_tokens": 3}, "max_tokens"),
]
TAKEN: list[dict[str, Any]] = [
    {"store": False, "background": False, "tools": [], "tool_choice": "auto", "truncation": "disabled", "text": {}},
    {"metadata": {"a": "b"}, "user": "me", "prompt_cache_key": "k", "parallel_tool_calls": True, "temperature": 0},
    {"input": [HI, {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": "a"}, HI]},
]


NAMED: list[tuple[dict[str, Any], str]] = [
    ({"store": True}, "store"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"truncation": "auto"}, "truncation"),
    ({"max_tool_calls": 3}, "max_tool_calls"),
    ({"include": ["reasoning.encrypted_content"]}, "include"),
    ({"reasoning": {"effort": "high", "summary": "auto"}}, "reasoning.effort, reasoning.summary"),
    ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, "text.verbosity"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
]


def client_of(engine: Engine) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0)


async def test_the_official_client_holds_a_conversation(engine: Engine) -> None:
    items: list[Any] = []
    cached = []
    async with client_of(engine) as client:
        for turn in range(3):
            items.append({"role": "user", "content": f"Question {turn}: " + "why is that so? " * 10})
            said = await client.responses.create(
                model=MODEL,
                instructions=SYSTEM,
                input=items,
                max_output_tokens=20,
                extra_body={"ignore_eos": True, "seed": 1},
            )
            assert (said.status, said.incomplete_details and said.incomplete_details.reason) == (
                "incomplete",
                "max_output_tokens",
            )
            assert (said.instructions, said.max_output_tokens, said.model_dump()["store"]) == (SYSTEM, 20, False)
            assert said.usage is not None
            assert said.usage.output_tokens == 20
            cached.append(said.usage.input_tokens_details.cached_tokens)
            items += [item.to_dict() for item in said.output]
        assert cached[0] == 0 < cached[1] < cached[2]
        with pytest.raises(openai.NotFoundError) as gone:
            await client.responses.create(model=MODEL, input="and?", previous_response_id=said.id)
        assert gone.value.code == "previous_response_not_found"


async def test_a_stream_says_what_the_whole_answer_does(engine: Engine) -> None:
    request: dict[str, Any] = {"model": MODEL, "input": "Why?", "max_output_tokens": 12, "extra_body": {"seed": 1}}
    async with client_of(engine) as client:
        whole = await client.responses.create(**request)
        kinds, words, last = list[str](), "", None
        async for event in await client.responses.create(stream=True, **request):
            assert event.sequence_number == len(kinds)
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                words += event.delta
            elif event.type in ("response.completed", "response.incomplete"):
                last = event.response
    assert last is not None
    assert words == last.output_text == whole.output_text
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.output_tokens == whole.usage.output_tokens
    told = [kind.removeprefix("response.") for kind in kinds if kind != "response.output_text.delta"]
    ends = ["output_text.done", "content_part.done", "output_item.done", last.status]
    assert told == ["created", "in_progress", "output_item.added", "content_part.added", *ends]


async def test_a_response_is_warm_from_a_chat_with_the_same_messages(engine: Engine) -> None:
    messages = [{"role": "system", "content": SYSTEM}, HI]
    status, chat = await engine.ask("/v1/chat/completions", messages=messages, max_tokens=2)
    status, said = await engine.ask(PATH, instructions=SYSTEM, input=[HI], max_output_tokens=2)
    assert status == 200
    assert said["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert said["usage"]["input_tokens_details"]["cached_tokens"] > 0.8 * said["usage"]["input_tokens"]


async def test_what_is_refused_is_named_and_what_asks_for_nothing_is_taken(engine: Engine) -> None:
    for change, param in REFUSED:
        status, answer = await engine.ask(PATH, **{"input": "hi", "max_output_tokens": 1, **change})
        assert (status, answer["error"]["param"]) == (400, param), (change, answer)
        assert answer["error"]["message"].startswith(param), (change, answer)
    for change in TAKEN:
        status, answer = await engine.ask(PATH, **{"input": "hi", "max_output_tokens": 1, **change})
        assert status == 200, (change, answer)
    assert engine.held_blocks() == 0


async def test_what_cannot_change_the_answer_is_ignored_and_named(engine: Engine) -> None:
    for change, names in NAMED:
        async with engine.post(PATH, **{"input": "hi", "max_output_tokens": 1, **change}) as response:
            assert response.status == 200, (change, await response.text())
            assert response.headers["warning"] == f'199 warmroute "ignored, without effect on the answer: {names}"'


async def test_effort_and_verbosity_are_variables_of_the_template(engine: Engine) -> None:
    source = "{{ messages[0].content }} effort {{ reasoning_effort }} and {{ verbosity }}"
    model = replace(engine.service.model, template=ChatRenderer(ChatTemplate(source, {})))
    engine.state.service = replace(engine.service, model=model)
    sizes = []
    async with client_of(engine) as client:
        for effort in ("low", "medium"):
            said = await client.responses.with_raw_response.create(
                model=MODEL,
                input="hi",
                max_output_tokens=1,
                reasoning={"effort": effort},
                text={"verbosity": "high"},
                store=True,
            )
            assert str(said.headers["warning"]).endswith('answer: store"')
            parsed = said.parse()
            assert (parsed.reasoning and parsed.reasoning.effort, parsed.text and parsed.text.verbosity) == (
                effort,
                "high",
            )
            assert parsed.usage is not None
            sizes.append(parsed.usage.input_tokens)
    assert sizes == [
        len(model.tokenizer.encode(f"hi effort {effort} and high", add_special_tokens=False).ids)
        for effort in ("low", "medium")
    ]


async def test_a_step_that_fails_ends_the_stream_in_an_error(start: Start) -> None:
    class Breaks(SimBackend):
        steps = 0

        async def run(self, plan: StepPlan) -> StepResult:
            self.steps += 1
            if self.steps == 4:
                raise RuntimeError("broken")
            return await super().run(plan)

    async with (
        start(backend=Breaks(FAST, 300)) as engine,
        engine.post(PATH, input="hi", stream=True, ignore_eos=True, max_output_tokens=50) as response,
    ):
        events = [orjson.loads(data) for data in SseDecoder().feed(await response.read())]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert (events[-1]["type"], events[-1]["error"]["type"]) == ("error", "server_error")
    assert not [event for event in events if event["type"] in ("response.completed", "response.incomplete")]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(name=st.sampled_from([*sorted(ResponsesFields.model_fields), "store", "unknown"]), value=JSON)
def test_any_json_in_any_field_is_answered(client: Client, name: str, value: Any) -> None:
    body = {"input": "hi", "max_output_tokens": 1, "stream": False, name: value}
    status, answer = client.post(PATH, orjson.dumps(body))
    assert status in (200, 400, 404)
    assert b'"object":"response"' in answer if status == 200 else orjson.loads(answer)["error"]["message"]
