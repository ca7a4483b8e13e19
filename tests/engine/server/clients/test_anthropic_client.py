"""The official Python client of the Messages API against one engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import anthropic
import orjson
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import TextBlock

from engine.backend.sim import SimBackend
from engine.sched.plan import StepPlan, StepResult
from tests.engine.server.conftest import FAST, MODEL, Engine, Start

SYSTEM = "You are a helpful assistant who knows the deployment well. " * 12
HI: Any = [{"role": "user", "content": "hi"}]
MARK = {"type": "ephemeral"}


def text_block(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def client_of(engine: Engine, **more: Any) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=engine.url, api_key="none", max_retries=0, **more)


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[AsyncAnthropic]:
    async with client_of(engine) as client:
        yield client


def keep_short_ones(engine: Engine) -> None:
    """Let the engine keep prefixes of any length."""
    service = engine.service
    engine.state.service = replace(service, model=replace(service.model, least_kept_tokens=1))


def said(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if isinstance(block, TextBlock))


def prompt_tokens(usage: anthropic.types.Usage) -> int:
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)


async def test_a_conversation_grows_the_tokens_that_are_read(client: AsyncAnthropic) -> None:
    messages: list[Any] = []
    read = []
    for turn in range(3):
        messages.append({"role": "user", "content": f"Question {turn}: " + "why is that so? " * 10})
        answer = await client.messages.create(model=MODEL, system=SYSTEM, messages=messages, max_tokens=20)
        assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 20)
        assert answer.usage.cache_creation_input_tokens == 0  # nothing is marked
        count = await client.messages.count_tokens(model=MODEL, system=SYSTEM, messages=messages)
        assert prompt_tokens(answer.usage) == count.input_tokens
        read.append(answer.usage.cache_read_input_tokens or 0)
        messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
    assert read[0] == 0
    assert read[0] < read[1] < read[2]


async def test_streaming_says_what_not_streaming_says(client: AsyncAnthropic) -> None:
    request: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 40, "extra_body": {"seed": 5}}
    whole = await client.messages.create(**request)
    async with client.messages.stream(**request) as stream:
        texts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    assert "".join(texts) == said(whole) == said(final)
    assert final.stop_reason == whole.stop_reason == "max_tokens"
    assert final.usage.output_tokens == whole.usage.output_tokens == 40
    assert prompt_tokens(final.usage) == prompt_tokens(whole.usage)
    assert final.id.startswith("msg_")


async def test_a_stream_has_the_events_of_the_api_in_their_order(engine: Engine) -> None:
    fields = {"messages": HI, "max_tokens": 12, "seed": 5, "stream": True}
    async with engine.post("/v1/messages", **fields) as response:
        assert response.content_type == "text/event-stream"
        events = (await response.read()).decode().removesuffix("\n\n").split("\n\n")
    names, data = [], []
    for event in events:
        name, line = event.split("\n")
        names.append(name.removeprefix("event: "))
        data.append(orjson.loads(line.removeprefix("data: ")))
    assert names == [one["type"] for one in data]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    usage = data[0]["message"]["usage"]
    assert usage["input_tokens"] > 0
    assert data[0]["message"]["stop_reason"] is None
    assert data[-2]["usage"] == {**usage, "output_tokens": 12}


async def test_equal_rendering_equal_cache_at_both_endpoints(client: AsyncAnthropic, engine: Engine) -> None:
    """A conversation that continues at the other API finds its cache, and has the same prefix keys."""
    messages: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "why is that so? " * 10}]
    status, chat = await engine.ask("/v1/chat/completions", messages=messages, max_tokens=1)
    held = engine.service.scheduler.held_keys()
    assert status == 200
    parts: Any = [text_block(SYSTEM[:50], cache_control=MARK), text_block(SYSTEM[50:])]
    answer = await client.messages.create(model=MODEL, system=parts, messages=messages[1:], max_tokens=1)
    assert prompt_tokens(answer.usage) == chat["usage"]["prompt_tokens"]
    assert answer.usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"] - 1
    assert engine.service.scheduler.held_keys() == held


async def test_usage_splits_the_prompt_at_the_last_mark(client: AsyncAnthropic, engine: Engine) -> None:
    keep_short_ones(engine)
    system = [text_block(SYSTEM, cache_control={"type": "ephemeral", "ttl": "1h"})]
    first: Any = [text_block("one " * 40, cache_control=MARK), text_block("two " * 40)]
    request: dict[str, Any] = {"model": MODEL, "system": system, "max_tokens": 1}
    cold = (await client.messages.create(**request, messages=[{"role": "user", "content": first}])).usage
    assert cold.cache_creation is not None
    hour, minutes = cold.cache_creation.ephemeral_1h_input_tokens, cold.cache_creation.ephemeral_5m_input_tokens
    bare = await client.messages.count_tokens(model=MODEL, messages=HI)
    whole = await client.messages.count_tokens(model=MODEL, system=SYSTEM, messages=HI)
    # The count of the system text alone includes template text after it.
    assert 0 < whole.input_tokens - bare.input_tokens - hour < 16
    assert 0 < minutes < cold.input_tokens
    assert cold.cache_creation_input_tokens == hour + minutes
    assert cold.cache_read_input_tokens == 0
    warm = (await client.messages.create(**request, messages=[{"role": "user", "content": first}])).usage
    assert warm.cache_creation_input_tokens == 0
    assert prompt_tokens(warm) == prompt_tokens(cold)
    assert (warm.cache_read_input_tokens or 0) > hour + minutes


async def test_a_mark_for_the_whole_request_is_one_at_its_end(client: AsyncAnthropic, engine: Engine) -> None:
    keep_short_ones(engine)
    messages: Any = [{"role": "user", "content": "count me " * 30}]
    answer = await client.messages.create(model=MODEL, messages=messages, max_tokens=1, cache_control=cast(Any, MARK))
    assert (answer.usage.cache_creation_input_tokens or 0) > answer.usage.input_tokens > 0


async def test_stop_sequences_are_named(start: Start, client: AsyncAnthropic) -> None:
    request: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 40, "extra_body": {"seed": 5}}
    text = said(await client.messages.create(**request))
    stop = text[len(text) // 2 :][:3]
    stopped = await client.messages.create(**request, stop_sequences=["never there", stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert said(stopped) == text[: text.index(stop)]
    async with client.messages.stream(**request, stop_sequences=[stop]) as stream:
        final = await stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence, said(final)) == ("stop_sequence", stop, said(stopped))


async def test_an_answer_ends_at_the_end_of_the_context(client: AsyncAnthropic, engine: Engine) -> None:
    messages: Any = [{"role": "user", "content": "a b c d " * 500}]
    count = (await client.messages.count_tokens(model=MODEL, messages=messages)).input_tokens
    service = engine.service
    short = replace(service.model, max_model_len=count + 5)
    engine.state.service = replace(service, model=short)
    answer = await client.messages.create(
        model=MODEL, messages=messages, max_tokens=32_000, timeout=20, extra_body={"ignore_eos": True}
    )
    assert (answer.stop_reason, answer.usage.output_tokens) == ("model_context_window_exceeded", 5)


async def test_no_token_is_asked_for_to_warm_the_cache(client: AsyncAnthropic) -> None:
    messages: Any = [{"role": "user", "content": "warm me up " * 20}]
    warming = await client.messages.create(model=MODEL, messages=messages, max_tokens=0)
    assert (warming.content, warming.usage.output_tokens, warming.stop_reason) == ([], 0, "max_tokens")
    answer = await client.messages.create(model=MODEL, messages=messages, max_tokens=1)
    assert (answer.usage.cache_read_input_tokens or 0) > 20


async def test_the_answer_goes_on_behind_words_of_the_assistant(client: AsyncAnthropic, engine: Engine) -> None:
    begun: Any = [*HI, {"role": "assistant", "content": "Well, I think"}]
    count = (await client.messages.count_tokens(model=MODEL, messages=begun)).input_tokens
    chat = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    request = {"max_tokens": 8, "seed": 3}
    _, expected = await engine.ask("/v1/chat/completions", **chat, **request)
    _, answer = await engine.ask("/v1/messages", messages=begun, **request)
    assert count == expected["usage"]["prompt_tokens"]
    assert answer["content"][0]["text"] == expected["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("change", "error", "kind", "named"),
    [
        ({"extra_body": {"temperature": 3}}, anthropic.BadRequestError, "invalid_request_error", "temperature"),
        ({"model": "other"}, anthropic.NotFoundError, "not_found_error", "other"),
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error", "messages"),
        ({"extra_body": {"max_tokns": 3}}, anthropic.BadRequestError, "invalid_request_error", "max_tokens"),
    ],
)
async def test_errors_arrive_as_the_clients_own(
    client: AsyncAnthropic, change: dict[str, Any], error: type[anthropic.APIStatusError], kind: str, named: str
) -> None:
    request: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 4}
    with pytest.raises(error) as caught:
        await client.messages.create(**{**request, **change}, extra_headers={"x-request-id": "mine"})
    assert caught.value.type == kind
    assert named in caught.value.message
    assert caught.value.request_id == "mine"
    body: Any = caught.value.body
    assert (body["type"], body["request_id"]) == ("error", "mine")


async def test_a_step_that_fails_ends_the_stream_with_an_error(start: Start) -> None:
    class Fails(SimBackend):
        steps = 0

        async def run(self, plan: StepPlan) -> StepResult:
            self.steps += 1
            if self.steps == 4:
                raise RuntimeError("out of memory")
            return await super().run(plan)

    async with start(backend=Fails(FAST, 300)) as engine, client_of(engine) as client:
        with pytest.raises(anthropic.APIStatusError) as caught:
            async with client.messages.stream(model=MODEL, messages=HI, max_tokens=40) as stream:
                await stream.get_final_message()
    assert caught.value.type == "api_error"


async def test_keys_are_shown_in_either_header(start: Start, tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("secret\n")
    request: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 1}
    async with start(api_key_file=file) as engine:
        for credentials in ({"api_key": "secret"}, {"auth_token": "secret", "api_key": None}):
            async with AsyncAnthropic(base_url=engine.url, max_retries=0, **credentials) as client:
                assert (await client.messages.create(**request)).usage.output_tokens == 1
        for key, status in (("secret", 200), ("wrong", 401)):
            async with engine.http.post(f"{engine.url}/v1/messages", json=request, headers={"x-api-key": key}) as got:
                assert got.status == status
        async with AsyncAnthropic(base_url=engine.url, max_retries=0, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await client.messages.create(**request)
    assert caught.value.type == "authentication_error"
