"""`/v1/responses` through the gateway: routed by prefix, counted, and bound to the pod that keeps the conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import orjson
import pytest
from aiohttp import web
from blockbuster import BlockBuster
from openai import AsyncOpenAI

from engine.common.sse import named_event
from engine.contract.requests import Endpoint
from router.engines.stream_reader import StreamReader
from router.engines.usage import Usage, whole_usage
from tests.redis_server import RedisServer
from tests.router.rig.helpers import (
    Gateway,
    Script,
    ScriptedEngine,
    answers,
    dies_after,
    running,
    streams,
)

PATH = str(Endpoint.RESPONSES)
LONG = "You are kind, and you know the handbook by heart. " * 30
USAGE = {
    "input_tokens": 500,
    "input_tokens_details": {"cached_tokens": 480},
    "output_tokens": 7,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 507,
}


def response(name: str, text: str | None, **more: Any) -> dict[str, Any]:
    """A response as vLLM writes it; without `text` it has only begun."""
    part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
    message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
    return {
        **{"id": name, "created_at": 1, "instructions": None, "metadata": None, "model": "m", "object": "response"},
        **{
            "output": [] if text is None else [message],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        },
        **{"status": "in_progress" if text is None else "completed", "usage": None if text is None else USAGE, **more},
    }


def told(name: str, words: list[str]) -> list[bytes]:
    """A stream's events."""

    def event(kind: str, number: int, **fields: Any) -> bytes:
        return named_event(kind, orjson.dumps({**fields, "sequence_number": number, "type": kind}))

    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    deltas = [
        event("response.output_text.delta", i + 1, delta=word, logprobs=[], **place) for i, word in enumerate(words)
    ]
    end = event("response.completed", len(words) + 1, response=response(name, "".join(words)))
    return [event("response.created", 0, response=response(name, None)), *deltas, end]


def keeper(pod: str, *, names: Iterator[str] | None = None) -> Script:
    """An engine that keeps what it answered, as vLLM with its store does."""
    kept: set[str] = set()

    async def play(request: web.Request) -> web.StreamResponse:
        fields = orjson.loads(await request.read())
        previous = fields.get("previous_response_id")
        if previous is not None and previous not in kept:
            said = {"message": f"Response with id '{previous}' not found.", "type": "invalid_request_error"}
            return web.json_response({"error": {**said, "param": "response_id", "code": 404}}, status=404)
        name = f"resp_{pod}{len(kept)}"
        kept.add(name)
        script = streams(told(name, ["Well, ", "hello."])) if fields.get("stream") else None
        return await (script or answers(200, orjson.dumps(response(name, "Hi."))))(request)

    return play


def client_of(gateway: Gateway, **more: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{gateway.url}/v1", **{"api_key": "none", "max_retries": 0, **more})


def test_the_usage_of_whole_answers_and_streams_is_read() -> None:
    assert whole_usage(orjson.dumps(response("resp_1", "x"))) == Usage(500, 7, 480, is_final=True)
    reader, early = StreamReader("/v1/responses"), StreamReader("/v1/responses")
    for event in told("resp_1", ["a", "b"]):
        reader.read(event)
    assert reader.usage() == Usage(500, 7, 480, is_final=True)
    early.read(told("resp_1", ["a"])[0])
    assert early.usage() == Usage()


async def test_the_official_client_goes_on_with_its_conversation(no_blocking_calls: BlockBuster) -> None:
    no_blocking_calls.deactivate()  # the client reads versions of packages from disk
    engines = [ScriptedEngine(pod, keeper(pod)) for pod in "abc"]
    async with running(*engines) as gateway, client_of(gateway) as client:
        for first in range(3):  # with round_robin, each conversation begins at another pod
            said = await client.responses.create(model="m", input=f"Hello {first}.")
            assert (said.output_text, said.usage and said.usage.input_tokens_details.cached_tokens) == ("Hi.", 480)
            pods = set()
            for _ in range(3):
                answer = await client.responses.with_raw_response.create(
                    model="m", input="And?", previous_response_id=said.id
                )
                pods.add(answer.headers["x-warmroute-pod"])
                said = answer.parse()
            assert len(pods) == 1
            words, last = "", ""
            async for event in await client.responses.create(
                model="m", input="And?", previous_response_id=said.id, stream=True
            ):
                if event.type == "response.output_text.delta":
                    words += event.delta
                elif event.type == "response.completed":
                    last = event.response.id
            assert words == "Well, hello."
            again = await client.responses.create(model="m", input="And?", previous_response_id=last)
            assert again.output_text == "Hi."
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.responses.create(model="m", input="And?", previous_response_id="resp_of_nobody")
        error = unknown.value
        assert (error.code, error.param) == ("previous_response_not_found", "previous_response_id")
        assert "send the whole conversation" in error.message
        unstored = await client.responses.create(model="m", input="Hi.", store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="m", input="And?", previous_response_id=unstored.id)
    assert all(engine.received for engine in engines)


async def test_what_a_pod_kept_is_gone_with_it() -> None:
    engines = [ScriptedEngine("a", keeper("a")), ScriptedEngine("b", keeper("b"))]
    async with running(*engines, eject_after=1) as gateway:
        first = await gateway.post({"model": "m", "input": "Hi."}, path=PATH)
        more = {"model": "m", "input": "And?", "previous_response_id": first.json["id"]}
        assert (await gateway.post(more, path=PATH)).pod == first.pod
        await engines["ab".index(first.pod)].stop()
        await gateway.wait_pods(1)
        gone = await gateway.post(more, path=PATH)
        assert (gone.status, gone.json["error"]["code"]) == (503, "no_engine")  # the pod may come back
        assert "send the whole conversation" in gone.json["error"]["message"]
        other = ScriptedEngine("c", keeper("c"))
        await other.start(int(engines["ab".index(first.pod)].url.rpartition(":")[2]))
        try:
            await gateway.wait_pods(2)
            gone = await gateway.post(more, path=PATH)
            assert (gone.status, gone.json["error"]["code"]) == (404, "previous_response_not_found")
        finally:
            await other.stop()


async def test_with_one_pod_that_pod_is_asked_and_a_conversation_stays_where_it_began() -> None:
    async with running(ScriptedEngine("a", keeper("a"))) as gateway:
        answer = await gateway.post({"model": "m", "input": "Hi.", "previous_response_id": "resp_x"}, path=PATH)
        assert (answer.status, answer.json["error"]["message"]) == (404, "Response with id 'resp_x' not found.")
    async with running(*(ScriptedEngine(pod, keeper(pod)) for pod in "abc")) as gateway:
        for name, value in (("c1", "c1"), ("c2", {"id": "c2"})):
            pods = {
                (await gateway.post({"model": "m", "input": "Hi.", "conversation": value}, path=PATH)).pod
                for _ in range(4)
            }
            assert len(pods) == 1, name


@pytest.mark.realtime
async def test_another_gateway_finds_the_pod(redis_server: RedisServer, no_blocking_calls: BlockBuster) -> None:
    no_blocking_calls.deactivate()  # the Redis client reads versions of packages from disk
    shared: dict[str, Any] = {"redis_url": redis_server.url}
    engines = [ScriptedEngine("a", keeper("a")), ScriptedEngine("b", keeper("b"))]
    async with running(*engines, **shared) as one, running(*engines, **shared) as two:
        first = await one.post({"model": "m", "input": "Hi."}, path=PATH)
        more = {"model": "m", "input": "And?", "previous_response_id": first.json["id"]}
        found = [await two.post(more, path=PATH) for _ in range(1)]
        deadline_s = asyncio.get_running_loop().time() + 20
        while found[-1].status != 200 and asyncio.get_running_loop().time() < deadline_s:
            found.append(await two.post(more, path=PATH))
        assert (found[-1].status, found[-1].pod) == (200, first.pod)


async def test_a_long_conversation_is_sent_where_it_is_warm_whichever_api_it_is_in() -> None:
    engines = [ScriptedEngine(pod, keeper(pod)) for pod in "abc"]
    async with running(*engines, policy="cache_aware") as gateway:
        first = await gateway.post({"model": "m", "instructions": LONG, "input": "Hi."}, path=PATH)
        items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi."}]}]
        chat = [{"role": "system", "content": LONG}, {"role": "user", "content": "Hi."}]
        for _ in range(3):
            there = await gateway.post({"model": "m", "instructions": LONG, "input": items}, path=PATH)
            beside = await gateway.post({"model": "m", "messages": chat}, path=str(Endpoint.CHAT))
            assert (there.pod, beside.pod) == (first.pod, first.pod)


async def test_a_stream_that_breaks_ends_in_an_error_that_the_client_raises(no_blocking_calls: BlockBuster) -> None:
    no_blocking_calls.deactivate()  # the client reads versions of packages from disk
    engine = ScriptedEngine("a", dies_after(told("resp_1", ["Well, "])[:2]))
    async with running(engine) as gateway, client_of(gateway) as client:
        words = ""

        async def listen() -> None:
            nonlocal words
            async for event in await client.responses.create(model="m", input="Hi.", stream=True):
                if event.type == "response.output_text.delta":
                    words += event.delta

        with pytest.raises(openai.APIError, match="broke"):
            await listen()
        assert words == "Well, "


@pytest.mark.parametrize("words", [1, 2])
async def test_a_stream_of_a_conversation_that_a_pod_has_goes_on_nowhere_else(words: int) -> None:
    """It starts nowhere else before its first word, and continues nowhere else after that."""
    engines = [ScriptedEngine(pod, keeper(pod)) for pod in "ab"]
    async with running(*engines) as gateway:
        first = await gateway.post({"model": "m", "input": "Hi."}, path=PATH)
        for engine in engines:
            engine.script = dies_after(told("resp_2", ["Well, "])[:words])
        more = {"model": "m", "input": "And?", "previous_response_id": first.json["id"], "stream": True}
        broken = await gateway.post(more, path=PATH)
        if words == 1:  # the response was only announced
            assert (broken.status, broken.json["error"]["type"]) == (502, "upstream_error")
        else:
            assert (broken.pod, broken.is_whole) == (first.pod, False)
            assert orjson.loads(broken.body.rpartition(b"data: ")[2])["type"] == "error"
        assert sum(len(engine.received) for engine in engines) == 2


async def test_a_split_keeps_a_conversation_at_the_model_that_has_it() -> None:
    engines = [ScriptedEngine("a", keeper("a"), models=["a"]), ScriptedEngine("b", keeper("b"), models=["b"])]
    async with running(*engines, model_split=["chat=a:50,b:50"]) as gateway:
        for first in range(6):
            answer = await gateway.post({"model": "chat", "input": f"{first}"}, path=PATH)
            for word in ("one", "two", "three"):
                more = {"model": "chat", "input": word, "previous_response_id": answer.json["id"]}
                again = await gateway.post(more, path=PATH)
                assert (again.status, again.pod) == (200, answer.pod)
    assert all(engine.received for engine in engines)
