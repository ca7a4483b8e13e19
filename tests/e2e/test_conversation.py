"""The main use, with the official client: a warm pod answers each turn of a growing conversation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.programs import Program, running
from tests.redis_server import running_redis

HANDBOOK = "You answer questions about the service handbook. Be brief, be kind, and name the page you quote. " * 12


@pytest.fixture(scope="module")
def gateway(tiny_checkpoint: Path) -> Iterator[str]:
    """Yield the URL of a gateway and two CPU engines with a real checkpoint, connected by a real Redis."""
    with running_redis() as redis:
        shared = ["--port", "0", "--redis-url", redis.url]
        flags = ["--model", str(tiny_checkpoint), "--served-model-name", "tiny", "--device", "cpu", "--threads", "1"]
        engines = [Program("engine", *flags, *shared) for _ in range(2)]
        with running(engines) as urls, running([Program("router", "--engines", ",".join(urls), *shared)]) as [url]:
            yield url


@pytest.fixture
def client(gateway: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway}/v1", api_key="none", timeout=30.0, max_retries=0) as client:
        yield client


def test_cached_tokens_grow_over_the_turns_of_a_conversation(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "system", "content": HANDBOOK}]
    cached, pods = [], set()
    for turn in range(4):
        messages.append({"role": "user", "content": f"Question {turn}: what does page {turn} say about restarts?"})
        raw = client.chat.completions.with_raw_response.create(
            model="tiny", messages=messages, max_tokens=12, temperature=0.0, extra_body={"ignore_eos": True}
        )
        answer = raw.parse()
        usage = answer.usage
        assert usage is not None
        assert usage.completion_tokens == 12
        assert answer.choices[0].finish_reason == "length"
        assert usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens or 0)
        pods.add(raw.headers["x-warmroute-pod"])
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    assert cached[0] == 0
    assert cached == sorted(set(cached)), f"cached tokens must grow with each turn: {cached}"
    assert cached[1] > 150, "the system prompt is reused"
    assert len(pods) == 1, "a conversation stays with its warm pod"


def test_the_same_streaming(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "system", "content": "Streamed. " + HANDBOOK}]
    cached = []
    for turn in range(3):
        messages.append({"role": "user", "content": f"Streamed question {turn}, please."})
        stream = client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=12,
            seed=7,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
        assert not chunks[-1].choices
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached.append(usage.prompt_tokens_details.cached_tokens or 0)
        messages.append({"role": "assistant", "content": text})
    assert cached[0] < cached[1] < cached[2], cached


def test_streamed_and_whole_answers_are_the_same_text(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "tiny",
        "prompt": HANDBOOK,
        "max_tokens": 16,
        "temperature": 0.0,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**ask).choices[0].text
    streamed = "".join(c.choices[0].text for c in client.completions.create(**ask, stream=True) if c.choices)
    assert streamed == whole


def test_errors_are_the_clients_own_exception_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nothing", messages=[{"role": "user", "content": "hi"}])
    assert "tiny" in str(unknown.value)
    with pytest.raises(openai.BadRequestError) as hot:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], temperature=9.0)
    assert hot.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="word " * 100_000)
    assert long.value.param == "prompt"


def test_models_lists_the_union(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
