"""The official clients, through the gateway, against engines that answer as each maker's do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import orjson
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import TextBlock, ToolUseBlock
from blockbuster import BlockBuster
from openai import AsyncOpenAI

from engine.contract import headers
from tests.router.rig.helpers import Gateway, running
from tests.router.rig.kinds import CACHED, CALL, KINDS, PROMPT, WORDS, Kind

TEXT = "".join(WORDS)
HI: list[Any] = [{"role": "user", "content": "Say hello. " * 60}]
SYSTEM = "You are kind, and you know the handbook by heart. " * 30
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}

pytestmark = pytest.mark.parametrize("maker", KINDS)


@pytest.fixture(autouse=True)
def reads_files(no_blocking_calls: BlockBuster) -> None:
    no_blocking_calls.deactivate()  # the clients read versions of packages from disk


@asynccontextmanager
async def served(maker: str) -> AsyncIterator[tuple[Gateway, Kind]]:
    engine = Kind(maker)
    async with running(engine, policy="cache_aware", model_alias=["gpt-4o=m", "claude=m"]) as gateway:
        yield gateway, engine


def openai_of(gateway: Gateway) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)


def anthropic_of(gateway: Gateway) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0)


async def test_chats_whole_and_streamed_with_tools(maker: str) -> None:
    async with served(maker) as (gateway, engine), openai_of(gateway) as client:
        for cached in (0, CACHED):
            whole = await client.chat.completions.create(model="gpt-4o", messages=HI)
            assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (TEXT, "stop")
            assert whole.usage is not None
            details = whole.usage.prompt_tokens_details
            assert ((details and details.cached_tokens) or 0) == cached
        words, usage = "", None
        stream = await client.chat.completions.create(
            model="gpt-4o", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            words += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        assert words == TEXT
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (PROMPT, 2)
        tool: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
        asked: Any = await client.chat.completions.create(model="gpt-4o", messages=HI, tools=[tool])
        (call,) = asked.choices[0].message.tool_calls
        assert call.type == "function"
        assert orjson.loads(call.function.arguments) == CALL
        assert {orjson.loads(one.body)["model"] for one in engine.received} == {"m"}
        warm = await client.chat.completions.with_raw_response.create(model="gpt-4o", messages=HI)
        assert int(warm.headers[headers.PREDICTED_CACHED]) > 0


async def test_completions_whole_and_streamed(maker: str) -> None:
    async with served(maker) as (gateway, _), openai_of(gateway) as client:
        whole = await client.completions.create(model="m", prompt="Say hello.")
        assert whole.choices[0].text == TEXT
        words = ""
        async for chunk in await client.completions.create(model="m", prompt="Say hello.", stream=True):
            words += "".join(choice.text for choice in chunk.choices)
        assert words == TEXT


async def test_responses_whole_and_streamed_and_their_next_turn(maker: str) -> None:
    async with served(maker) as (gateway, engine), openai_of(gateway) as client:
        whole = await client.responses.create(model="gpt-4o", input="Say hello.")
        assert whole.output_text == TEXT
        async with client.responses.stream(model="gpt-4o", input="And?", previous_response_id=whole.id) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_response()
        assert final.output_text == TEXT
        assert orjson.loads(engine.received[-1].body)["previous_response_id"] == whole.id


async def test_embeddings_recordings_and_rankings(maker: str) -> None:
    async with served(maker) as (gateway, engine), openai_of(gateway) as client:
        made = await client.embeddings.create(model="gpt-4o", input="some words", encoding_format="float")
        assert made.data[0].embedding == [0.5, 0.25]
        heard = await client.audio.transcriptions.create(model="gpt-4o", file=("a.wav", bytes(5000), "audio/wav"))
        assert heard.text == TEXT
        ranked = await gateway.post({"model": "m", "query": "q", "documents": ["a", "b"]}, path="/v1/rerank")
        assert [one["index"] for one in ranked.json["results"]] == [0, 1]
        assert len(engine.received) == 3


async def test_what_an_engine_refuses_is_an_error_that_the_client_knows(maker: str) -> None:
    async with served(maker) as (gateway, engine), openai_of(gateway) as client, anthropic_of(gateway) as other:
        with pytest.raises(openai.BadRequestError, match="temperature must be at most 2") as refused:
            await client.chat.completions.create(model="m", messages=HI, temperature=3)
        assert refused.value.param == "temperature"
        with pytest.raises(anthropic.BadRequestError, match="temperature must be at most 2"):
            await other.messages.create(model="m", messages=HI, max_tokens=9, extra_body={"temperature": 3})
        assert len(engine.received) == 2, "the client's bad request was tried again"
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await other.messages.create(model="nobody", messages=HI, max_tokens=9)
        body: Any = unknown.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
        assert body["request_id"] == unknown.value.request_id
        with pytest.raises(openai.NotFoundError, match="served here"):
            await client.moderations.create(model="m", input="x")


async def test_messages_whole_and_streamed_with_marks_and_counted(maker: str) -> None:
    marked: Any = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    asked: dict[str, Any] = {"model": "claude", "max_tokens": 20, "messages": HI}
    async with served(maker) as (gateway, engine), anthropic_of(gateway) as client:
        for cached, system in ((0, SYSTEM), (CACHED, marked)):
            raw = await client.messages.with_raw_response.create(**asked, system=system)
            whole = await raw.parse()
            (block,) = whole.content
            assert isinstance(block, TextBlock)
            assert (block.text, whole.stop_reason) == (TEXT, "end_turn")
            assert (whole.usage.input_tokens, whole.usage.cache_read_input_tokens or 0) == (PROMPT - cached, cached)
            assert (int(raw.headers[headers.PREDICTED_CACHED]) > 0) == bool(cached), "marks changed the keys"
        assert orjson.loads(engine.received[-1].body)["system"] == marked, "the engine did not get the marks"
        async with client.messages.stream(**asked, system=marked) as stream:
            words = "".join([text async for text in stream.text_stream])
            final = await stream.get_final_message()
        assert words == TEXT
        assert (final.stop_reason, final.usage.output_tokens, final.usage.cache_read_input_tokens) == (
            "end_turn",
            2,
            CACHED,
        )
        count = await client.messages.count_tokens(model="claude", messages=HI, system=SYSTEM)
        assert count.input_tokens == PROMPT
        assert engine.received[-1].path == "/v1/messages/count_tokens"


async def test_messages_with_tools_whole_and_streamed(maker: str) -> None:
    tool: Any = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}
    asked: dict[str, Any] = {"model": "m", "max_tokens": 20, "messages": HI, "tools": [tool]}
    async with served(maker) as (gateway, engine), anthropic_of(gateway) as client:
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            final = await stream.get_final_message()
        for answer in (whole, final):
            (block,) = answer.content
            assert isinstance(block, ToolUseBlock)
            assert (block.name, block.input, answer.stop_reason) == ("weather", CALL, "tool_use")
        turn = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in whole.content]}
        result = {"type": "tool_result", "tool_use_id": "call_1", "content": "rain"}
        again = await client.messages.with_raw_response.create(
            **{**asked, "messages": [*HI, turn, {"role": "user", "content": [result]}]}
        )
        assert int(again.headers[headers.PREDICTED_CACHED]) > 0, "the conversation was not recognized when it went on"
        assert orjson.loads(engine.received[-1].body)["messages"][-1]["content"] == [result]
