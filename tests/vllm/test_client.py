"""The official client through a gateway to real vLLM servers: answers, streams and errors are as it expects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import openai
import pytest

from engine.contract import headers
from tests.redis_server import RedisServer
from tests.vllm.servers import MODEL, VllmServer
from tests.vllm.table import gateways

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

HANDBOOK = "You answer for the harbour office, briefly, and quote its handbook. " * 60


@pytest.fixture
def client(servers: list[VllmServer], redis: RedisServer) -> Iterator[openai.OpenAI]:
    """A client of a gateway in front of the two servers. The client does not retry."""
    with (
        gateways(servers, 1, "predicted_ttft", redis.url) as (program,),
        openai.OpenAI(base_url=f"{program.url}/v1", api_key="none", max_retries=0, timeout=60.0) as client,
    ):
        yield client


def ask_handbook(client: openai.OpenAI, question: str, **more: Any) -> Any:
    """Return one answer about the handbook."""
    create: Any = client.chat.completions.create
    return create(
        model=MODEL,
        messages=[{"role": "system", "content": HANDBOOK}, {"role": "user", "content": question}],
        max_tokens=8,
        temperature=0.0,
        **more,
    )


def test_a_second_question_reuses_the_first_ones_prefix(client: openai.OpenAI) -> None:
    first, second = ask_handbook(client, "Where is berth 4?"), ask_handbook(client, "And when does it open?")
    for answer in (first, second):
        assert answer.choices[0].message.role == "assistant"
        assert answer.usage is not None
        assert 0 < answer.usage.completion_tokens <= 8
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert cached > 0.8 * second.usage.prompt_tokens


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    whole = ask_handbook(client, "Where is berth 4?")
    chunks = list(ask_handbook(client, "Where is berth 4?", stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completions_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": HANDBOOK, "max_tokens": 8, "temperature": 0.0}
    whole = client.completions.create(**asked)
    with client.completions.create(**asked, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == whole.choices[0].text


def test_the_answers_headers_name_the_pod(client: openai.OpenAI, servers: list[VllmServer]) -> None:
    answer = client.completions.with_raw_response.create(model=MODEL, prompt="Where?", max_tokens=1)
    assert answer.headers[headers.POD] in {server.url.removeprefix("http://") for server in servers}
    assert answer.parse().choices[0].finish_reason == "length"


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_errors_are_the_clients_own_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="elsewhere"):
        client.completions.create(model="elsewhere", prompt="Where?")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=MODEL, prompt="Where?", max_tokens=-1)
    with pytest.raises(openai.BadRequestError, match="4096"):
        client.completions.create(model=MODEL, prompt=HANDBOOK * 20, max_tokens=8)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=cast(Any, [{"role": "user", "content": 7}]))
    assert ask_handbook(client, "Still there?").choices, "refused requests leave the gateway and the pods in order"


def test_a_client_that_leaves_a_stream_frees_the_server(client: openai.OpenAI, servers: list[VllmServer]) -> None:
    with client.completions.create(
        model=MODEL, prompt=HANDBOOK, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    for server in servers:
        server.reset_cache()  # the server refuses while a request has blocks, and `reset_cache` gives up after a while
