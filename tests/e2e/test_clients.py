"""The official clients of both APIs, used through the gateway with our own engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import TextBlock

from tests.e2e.programs import Program, running
from tests.redis_server import RedisServer

SYSTEM = "You answer questions about the service handbook. Be brief, be kind, and name the page you quote. " * 12
HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def gateway(sim_engines: tuple[RedisServer, list[Program]]) -> Iterator[str]:
    """Yield the URL of a gateway with two engines without weights."""
    urls = ",".join(engine.url for engine in sim_engines[1][:2])
    with running([Program("router", "--engines", urls, "--model-alias", "gpt-4o=tiny,claude=tiny", "--port", "0")]) as [
        url
    ]:
        yield url


def test_the_client_of_openai(gateway: str) -> None:
    with openai.OpenAI(base_url=f"{gateway}/v1", api_key="none", timeout=30.0, max_retries=0) as client:
        chat: dict[str, Any] = {"model": "gpt-4o", "messages": [{"role": "system", "content": SYSTEM}, *HI]}
        whole = client.chat.completions.create(**chat, max_tokens=5, seed=3)
        again = client.chat.completions.create(
            **chat, max_tokens=5, seed=3, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(again)
        words = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert words == whole.choices[0].message.content
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert (usage.prompt_tokens_details.cached_tokens or 0) > 150, "the second request went to the warm pod"
        text = client.completions.create(model="tiny", prompt="Say hello.", max_tokens=5, seed=3)
        told = client.completions.create(model="tiny", prompt="Say hello.", max_tokens=5, seed=3, stream=True)
        assert "".join(choice.text for chunk in told for choice in chunk.choices) == text.choices[0].text
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.chat.completions.create(**chat, max_tokens=-1)


def test_the_client_of_openai_for_responses(gateway: str) -> None:
    with openai.OpenAI(base_url=f"{gateway}/v1", api_key="none", timeout=30.0, max_retries=0) as client:
        client.responses.create(model="tiny", instructions=SYSTEM, input="hi", max_output_tokens=16)
        said = client.responses.create(model="tiny", instructions=SYSTEM, input="hi", max_output_tokens=16)
        assert said.usage is not None
        assert said.usage.input_tokens_details.cached_tokens > 150
        *_, last = client.responses.create(model="tiny", input="hi", max_output_tokens=16, stream=True)
        assert last.type in ("response.completed", "response.incomplete")
        assert last.response.usage is not None
        with pytest.raises(openai.NotFoundError):  # our engine stores no responses
            client.responses.retrieve(said.id)


def test_what_our_engine_has_not_is_a_404_for_the_client(gateway: str) -> None:
    with openai.OpenAI(base_url=f"{gateway}/v1", api_key="none", timeout=30.0, max_retries=0) as client:
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="tiny", input="hi")
        with pytest.raises(openai.NotFoundError):
            client.post("/rerank", body={"model": "tiny", "query": "q", "documents": ["a"]}, cast_to=object)
        for _ in range(3):  # after three, every pod is known to lack the path
            with pytest.raises(openai.NotFoundError):
                client.audio.transcriptions.create(model="tiny", file=("a.wav", bytes(3_000_000), "audio/wav"))


def test_the_client_of_anthropic(gateway: str) -> None:
    marked: Any = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    asked: dict[str, Any] = {"model": "claude", "messages": HI, "max_tokens": 5}
    with anthropic.Anthropic(base_url=gateway, api_key="none", timeout=30.0, max_retries=0) as client:
        whole = client.messages.create(**asked, system=SYSTEM)
        with client.messages.stream(**asked, system=marked) as stream:
            words = "".join(stream.text_stream)
            final = stream.get_final_message()
        (block,) = final.content
        assert isinstance(block, TextBlock)
        assert block.text == words
        assert whole.stop_reason == final.stop_reason == "max_tokens"
        assert (final.usage.cache_read_input_tokens or 0) > 150, "marks changed the pod or the cached tokens"
        count = client.messages.count_tokens(model="claude", messages=HI, system=SYSTEM)
        read = final.usage.cache_read_input_tokens or 0
        assert count.input_tokens == final.usage.input_tokens + read + (final.usage.cache_creation_input_tokens or 0)
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**asked, "model": "nobody"})
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            client.messages.create(**{**asked, "max_tokens": -1})
