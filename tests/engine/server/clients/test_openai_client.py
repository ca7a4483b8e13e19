"""The official Python client against one engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import openai
import pytest
from openai import AsyncOpenAI

from tests.engine.server.conftest import MODEL, Engine

SYSTEM = "You are a helpful assistant who knows the deployment well. " * 12
TOOL = {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": {"type": "object"}}}


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_a_conversation_grows_its_cached_tokens(client: AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    cached: list[int] = []
    for turn in range(3):
        messages.append({"role": "user", "content": f"Question {turn}: " + "why is that so? " * 10})
        answer = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=20)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 20
        cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
        # The client sends the answer back unchanged, with the fields that the library adds.
        messages.append(answer.choices[0].message.model_dump())
    assert cached[0] == 0
    assert cached[0] < cached[1] < cached[2]


@pytest.mark.parametrize("name", [MODEL, "meta-llama/Llama-3-8B", "org/a b%2Fc/d?e#f"])
async def test_a_model_is_retrieved_as_it_is_listed(client: AsyncOpenAI, engine: Engine, name: str) -> None:
    engine.state.service = replace(engine.service, model=replace(engine.service.model, name=name))
    (listed,) = (await client.models.list()).data
    assert await client.models.retrieve(name) == listed
    assert listed.id == name
    with pytest.raises(openai.NotFoundError) as missing:
        await client.models.retrieve(f"{name}/other")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


async def test_streaming_says_what_not_streaming_says(client: AsyncOpenAI) -> None:
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 40,
        "seed": 5,
    }
    whole = await client.chat.completions.create(**request)
    stream = await client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:-1]] == ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 40


async def test_choices_of_one_request_differ_and_are_reproducible(client: AsyncOpenAI) -> None:
    async def texts() -> list[str | None]:
        answer = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], n=3, seed=1, max_tokens=10
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 30
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    first = await texts()
    assert len(set(first)) == 3
    assert await texts() == first


async def test_log_probabilities_cover_every_token(client: AsyncOpenAI) -> None:
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 12,
        "seed": 3,
    }
    answer = await client.chat.completions.create(**request, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 12
    assert all(len(token.top_logprobs) == 2 for token in content)
    assert all(bytes(token.bytes or []).decode(errors="replace") == token.token for token in content)
    stream = await client.chat.completions.create(**request, logprobs=True, top_logprobs=2, stream=True)
    streamed = [
        token
        async for chunk in stream
        if chunk.choices[0].logprobs is not None
        for token in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == content


async def test_completions_take_texts_and_token_ids(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt=["one", "two"], n=2, max_tokens=4, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    ids = await client.completions.create(model=MODEL, prompt=[[1, 2, 3]], logprobs=1)
    assert ids.usage is not None
    assert (ids.usage.prompt_tokens, ids.usage.completion_tokens) == (3, 16)
    logprobs = ids.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs or []) == 16
    assert logprobs.text_offset[-1] == len("".join(logprobs.tokens[:-1]))


async def test_echo_repeats_the_prompt(client: AsyncOpenAI) -> None:
    request: dict[str, Any] = {"model": MODEL, "prompt": "once upon a time", "max_tokens": 3, "seed": 1}
    plain = await client.completions.create(**request)
    echoed = await client.completions.create(**request, echo=True)
    stream = await client.completions.create(**request, echo=True, stream=True)
    assert echoed.choices[0].text == "once upon a time" + plain.choices[0].text
    assert "".join([chunk.choices[0].text async for chunk in stream]) == echoed.choices[0].text


async def test_tools_and_calls_are_part_of_the_prompt(client: AsyncOpenAI, engine: Engine) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": json.dumps({"what": "<b>&"})}}
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "fi"}, {"type": "text", "text": "nd"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    answer = await client.chat.completions.create(model=MODEL, messages=messages, tools=cast(Any, [TOOL]), max_tokens=2)
    _, tokens = await engine.ask("/tokenize", messages=messages, tools=[TOOL])
    _, text = await engine.ask("/detokenize", tokens=tokens["tokens"])
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == tokens["count"]
    for part in ("# Tools", '"name": "find"', '{"what": "<b>&"}', "user\nfind", "tool\n42"):
        assert part in text["prompt"]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"temperature": 3}, openai.BadRequestError),
        ({"model": "other"}, openai.NotFoundError),
        ({"messages": []}, openai.BadRequestError),
        ({"extra_body": {"max_tokns": 3}}, openai.BadRequestError),
    ],
)
async def test_errors_arrive_as_the_clients_own(
    client: AsyncOpenAI, change: dict[str, Any], error: type[Exception]
) -> None:
    request: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(error) as caught:
        await client.chat.completions.create(**{**request, **change})
    assert isinstance(caught.value, openai.APIStatusError)
    assert caught.value.param is not None


async def test_models_are_listed(client: AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == [MODEL]
