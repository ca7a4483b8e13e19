"""`/v1/messages` through the gateway: routed by prefix, counted, and answered in that API's shape whatever happens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anthropic
import orjson
import pytest
from aiohttp import web
from anthropic import AsyncAnthropic
from blockbuster import BlockBuster

from engine.common.sse import named_event
from router.engines.stream_reader import StreamFailed, StreamReader
from router.engines.usage import usage_in, whole_usage
from tests.router.rig.helpers import (
    Gateway,
    Script,
    ScriptedEngine,
    answers,
    dies_after,
    running,
    streams,
)

PATH = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
LONG = "You are kind, and you know the handbook by heart. " * 30


def event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, orjson.dumps({"type": kind, **fields}))


def usage(read: int | None, new: int, output: int, written: int | None = None) -> dict[str, int]:
    said = {"input_tokens": new, "output_tokens": output}
    if written is not None:
        said["cache_creation_input_tokens"] = written
    return said if read is None else {**said, "cache_read_input_tokens": read}


def message(text: str, told: dict[str, int]) -> bytes:
    body = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn"}
    return orjson.dumps({**body, "stop_sequence": None, "content": [{"type": "text", "text": text}], "usage": told})


def told(words: Iterable[str], at_end: dict[str, int]) -> list[bytes]:
    """A stream's events."""
    head: dict[str, Any] = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
    }
    return [
        event("message_start", message={**head, "stop_sequence": None, "usage": {**at_end, "output_tokens": 0}}),
        event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        *[event("content_block_delta", index=0, delta={"type": "text_delta", "text": word}) for word in words],
        event("content_block_stop", index=0),
        event("message_delta", delta={"stop_reason": "end_turn", "stop_sequence": None}, usage=at_end),
        event("message_stop"),
    ]


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 20, "messages": HI, **fields}


def client_of(gateway: Gateway, **more: Any) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=gateway.url, **{"api_key": "none", "max_retries": 0, **more})


async def test_the_official_client_gets_its_answer_and_its_stream(no_blocking_calls: BlockBuster) -> None:
    words = ["Well, ", "hello."]

    async def play(request: web.Request) -> web.StreamResponse:
        is_stream = orjson.loads(await request.read()).get("stream")
        script: Script = (
            streams(told(words, usage(8, 3, 2))) if is_stream else answers(200, message("Hi.", usage(8, 3, 2)))
        )
        return await script(request)

    no_blocking_calls.deactivate()  # the client reads files when it is made
    async with running(ScriptedEngine("a", play)) as gateway, client_of(gateway) as client:
        whole = await client.messages.create(**asked())
        async with client.messages.stream(**asked()) as stream:
            final = await stream.get_final_message()
        assert [block.model_dump(include={"text"}) for block in final.content] == [{"text": "".join(words)}]
        assert (whole.usage.cache_read_input_tokens, final.usage.cache_read_input_tokens) == (8, 8)
        metrics = (await gateway.get("/metrics")).body.decode()
    for kind, count in (("prompt", 22), ("cached", 16)):
        assert f'warmroute_gateway_tokens_total{{kind="{kind}",policy="round_robin"}} {count:.1f}' in metrics


async def test_a_conversation_stays_with_its_pod_at_either_api() -> None:
    engines = [ScriptedEngine(name, answers(200, message("Hi.", usage(0, 3, 2)))) for name in "ab"]
    async with running(*engines, policy="cache_aware") as gateway:
        messages = [{"role": "user", "content": "Why? " * 60}]
        marked = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}]
        first = await gateway.post(asked(system=LONG, messages=messages), path=PATH)
        for fields in (asked(system=marked, messages=[*messages, {"role": "assistant", "content": "So."}, *HI]),) * 3:
            again = await gateway.post(fields, path=PATH)
            assert again.pod == first.pod
            assert int(again.headers["x-warmroute-cached-tokens-predicted"]) > 100
        chat = {"model": "m", "messages": [{"role": "system", "content": LONG}, *messages]}
        assert (await gateway.post(chat, path="/v1/chat/completions")).pod == first.pod
        explained = (await gateway.post(asked(system=LONG, messages=messages), path="/v1/route/explain")).json
        assert (explained["pod"], explained["prefix_keys"]) == (
            first.pod,
            (len(LONG) + len("system user") + 300) // 256,
        )


async def test_a_token_count_is_placed_by_load_and_believed_of_nobody() -> None:
    engines = [ScriptedEngine(name, answers(200, b'{"input_tokens": 411}')) for name in "ab"]
    async with running(*engines) as gateway:
        fields = {"model": "m", "system": LONG, "messages": HI}
        pods = set()
        for _ in range(4):
            answer = await gateway.post(fields, path=f"{PATH}/count_tokens")
            assert answer.json == {"input_tokens": 411}
            pods.add(answer.pod)
        assert pods == {"a", "b"}
        assert {received.path for engine in engines for received in engine.received} == {f"{PATH}/count_tokens"}
        explained = (await gateway.post({**fields, "max_tokens": 1}, path="/v1/route/explain")).json
        assert explained["cached_tokens_predicted"] == 0


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        (asked(model="other"), 404, "not_found_error"),
        (asked(messages=[]), 400, "invalid_request_error"),
        (asked(system=3), 400, "invalid_request_error"),
        (b"{", 400, "invalid_request_error"),
    ],
)
async def test_errors_of_the_gateway_have_the_shape_of_the_api(fields: Any, status: int, kind: str) -> None:
    async with running(ScriptedEngine("a", answers(200))) as gateway:
        answer = await gateway.post(fields, path=PATH, **{"x-request-id": "mine"})
        assert (answer.status, answer.json["type"], answer.json["error"]["type"]) == (status, "error", kind)
        assert answer.headers["request-id"] == answer.json["request_id"] == "mine"
        other = await gateway.get(PATH)
        assert (other.status, other.json["type"]) == (405, "error")


async def test_no_engine_is_an_overload() -> None:
    async with running(ScriptedEngine("a", answers(503, b"{}"))) as gateway:
        answer = await gateway.post(asked(), path=PATH)
    assert answer.status == 503


async def test_an_engines_refusal_is_passed_on_as_it_is() -> None:
    refusal = b'{"type":"error","error":{"type":"invalid_request_error","message":"no"}}'
    async with running(
        ScriptedEngine("a", answers(400, refusal)), ScriptedEngine("b", answers(400, refusal))
    ) as gateway:
        answer = await gateway.post(asked(), path=PATH)
    assert (answer.status, answer.body) == (400, refusal)


async def test_a_stream_that_begins_with_an_error_goes_to_another_pod() -> None:
    error = event("error", error={"type": "internal_error", "message": "out of memory"})
    engines = [ScriptedEngine("a", streams([error])), ScriptedEngine("b", streams(told(["x"], usage(0, 3, 1))))]
    async with running(*engines) as gateway:
        for _ in range(2):
            answer = await gateway.post(asked(stream=True), path=PATH)
            assert (answer.pod, answer.body) == ("b", b"".join(told(["x"], usage(0, 3, 1))))


@pytest.mark.parametrize("says_why", [True, False])
async def test_a_broken_stream_ends_in_an_error_of_the_api(no_blocking_calls: BlockBuster, says_why: bool) -> None:
    begun = told(["Well, "], usage(0, 3, 1))[:3]
    error = event("error", error={"type": "internal_error", "message": "out of memory"})
    engine = ScriptedEngine("a", dies_after([*begun, error] if says_why else begun))
    no_blocking_calls.deactivate()
    async with running(engine) as gateway, client_of(gateway) as client:
        answer = await gateway.post(asked(stream=True), path=PATH)
        assert not answer.is_whole
        assert answer.body.startswith(b"".join(begun) + b"event: error\ndata: ")
        said = orjson.loads(answer.body.rpartition(b"data: ")[2])
        assert said["type"] == "error"
        assert ("out of memory" in said["error"]["message"]) == says_why
        with pytest.raises(anthropic.APIError):
            async with client.messages.stream(**asked()) as stream:
                await stream.get_final_message()


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text("secret\n")
    return file


async def test_keys_are_shown_in_either_header_and_kept_from_engines(
    key_file: Path, no_blocking_calls: BlockBuster
) -> None:
    engine = ScriptedEngine("a", answers(200, message("Hi.", usage(0, 3, 2))))
    no_blocking_calls.deactivate()
    async with running(engine, api_keys_file=str(key_file)) as gateway:
        refused = await gateway.post(asked(), path=PATH, **{"x-api-key": "wrong"})
        assert (refused.status, refused.json["error"]["type"]) == (401, "authentication_error")
        async with client_of(gateway, api_key="secret") as client:
            await client.messages.create(**asked())
        assert (await gateway.post(asked(), path=PATH, **{"x-api-key": "secret"})).status == 200
    assert not {"x-api-key", "authorization"} & {name.lower() for one in engine.received for name in one.headers}
    engine = ScriptedEngine("a", answers(200, message("Hi.", usage(0, 3, 2))))
    async with running(engine) as gateway:
        await gateway.post(asked(), path=PATH, **{"x-api-key": "theirs"})
    assert engine.received[-1].headers["x-api-key"] == "theirs"


def test_what_is_read_of_an_answer() -> None:
    reader = StreamReader(PATH)
    reader.read(b"".join(told(["x"] * 3, usage(8, 3, 5, 2))))
    counts = reader.usage()
    assert (counts.prompt_tokens, counts.completion_tokens, counts.cached_tokens) == (13, 5, 8)
    assert counts.is_final
    assert reader.usage(is_broken=True).completion_tokens == 5
    silent = whole_usage(message("x", usage(None, 3, 5)))
    assert (silent.prompt_tokens, silent.cached_tokens, silent.is_final) == (3, None, False)
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"input_tokens": 99, "cache_read_input_tokens": 98}}
    body = orjson.dumps({"content": [call], "usage": usage(2, 3, 1)})
    assert usage_in(body).prompt_tokens == 5
    assert usage_in(b'{"input_tokens": 411}').prompt_tokens is None


def test_what_is_read_of_an_error() -> None:
    error = event("error", error={"type": "overloaded_error", "message": "full"})
    before = event("ping") + event("content_block_delta", index=0, delta={"text": '{"type":"error","error":{'})
    with pytest.raises(StreamFailed) as failed:
        StreamReader(PATH).read(before + error)
    assert (failed.value.message, failed.value.at, failed.value.event) == ("full", len(before), error)
    for kind in ("invalid_request_error", "not_found_error"):
        reader = StreamReader(PATH)
        reader.read(event("error", error={"type": kind, "message": "no"}))
        assert reader.has_end
