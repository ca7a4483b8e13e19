"""Paths without prefixes: requests go to the least loaded pod that knows the path; and which other paths pass."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import openai
import orjson
import pytest
from aiohttp import web
from blockbuster import BlockBuster
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from engine.contract.errors import BadRequest, ModelNotFound
from router.engines.engine_errors import is_unknown_path
from router.forwarding.candidates import LACK_TTL_S, Candidates
from router.reading.by_load import BY_LOAD, asked_model
from router.reading.client_paths import passes
from tests.router.rig.helpers import DEADLINE_S, Script, ScriptedEngine, answers, running

EMBEDDINGS = "/v1/embeddings"
EMBEDDING = {"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}
USAGE = {"prompt_tokens": 4, "total_tokens": 4}
EMBEDDED = orjson.dumps({"object": "list", "data": [EMBEDDING], "model": "m", "usage": USAGE})
SGLANG = b'{"detail":"Not Found"}'
VLLM = b'{"error":{"message":"Not Found","type":"Not Found","param":null,"code":404}}'
OURS = BadRequest("POST /v1/embeddings: 404: Not Found").body()


def knows(paths: dict[str, Script], missing: Script) -> Script:
    async def play(request: web.Request) -> web.StreamResponse:
        return await paths.get(request.path, missing)(request)

    return play


@pytest.mark.parametrize(
    ("status", "body", "unknown"),
    [
        *((404, body, True) for body in (SGLANG, VLLM, OURS, b"404 page not found", b"")),
        *((405, body, True) for body in (b"", b'{"detail":"Method Not Allowed"}', VLLM)),
        (404, ModelNotFound("model 'x' does not exist; known: m", param="model", code="model_not_found").body(), False),
        (404, b'{"error":{"message":"The model `x` does not exist.","type":"NotFoundError","code":404}}', False),
        (404, b'{"error":{"message":"Response with id \'x\' not found.","param":"response_id","code":404}}', False),
        *((404, body, False) for body in (b"[]", b"7", b"{}", b'{"error":7}', b'{"detail":["Not Found"]}')),
        (400, b"", False),
        (200, SGLANG, False),
        (500, SGLANG, False),
    ],
)
def test_an_unknown_path_is_told_from_an_unknown_model(status: int, body: bytes, unknown: bool) -> None:
    assert is_unknown_path(status, body) is unknown


@given(st.text(max_size=20).map(lambda text: URL.build(path=f"/v1/{text}").raw_path))
def test_what_passes_stays_below_v1(raw_path: str) -> None:
    if passes(raw_path):
        at_engine = URL(f"http://engine{raw_path}").raw_path
        assert at_engine == raw_path
        assert at_engine.startswith("/v1/")


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/", "/v1/../x", "/v1/%2e%2e/x", "/v1/a/..%2f..%2fx", "/v1/a//b", "/v1/a%00", "/v1/a%5cb"),
        *("/v1/%252e%252e/x", "/v2/x", "/v1", "/v1/load_lora_adapter", "/v1/unload%5Flora_adapter"),
    ],
)
def test_what_might_be_another_path_to_an_engine_does_not_pass(path: str) -> None:
    assert not passes(path)
    assert passes("/v1/moderations")
    assert passes("/v1/images/generations")


@pytest.mark.parametrize("fields", [{}, {"model": None}, {"model": 7}, {"model": ["m"]}])
def test_a_model_that_is_no_string_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="model must be a string"):
        asked_model(fields, is_required=True)


async def test_every_path_passes_as_it_came(no_blocking_calls: BlockBuster) -> None:
    no_blocking_calls.deactivate()  # the client reads versions of packages from disk
    engine = ScriptedEngine("a", answers(200, EMBEDDED))
    async with (
        running(engine, model_alias=["text-embedding-3-small=m"]) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for path in BY_LOAD:
            body = orjson.dumps({"model": "m", "input": path})
            answer = await gateway.post(body, path=path)
            assert (answer.status, answer.body, answer.pod) == (200, EMBEDDED, "a"), path
            assert (engine.received[-1].path, engine.received[-1].body) == (path, body)
        said = await client.embeddings.create(
            model="text-embedding-3-small", input="some words", encoding_format="float"
        )
        assert said.data[0].embedding == [0.5, 0.25]
        assert orjson.loads(engine.received[-1].body)["model"] == "m"
        missing = await gateway.post({"model": "n", "input": "x"}, path=EMBEDDINGS)
        assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found")
        await client.audio.speech.create(model="m", voice="alloy", input="Say it.")
        assert engine.received[-1].path == "/v1/audio/speech"


async def test_speech_is_heard_while_the_rest_of_it_is_made(no_blocking_calls: BlockBuster) -> None:
    no_blocking_calls.deactivate()  # the client reads versions of packages from disk
    heard = asyncio.Event()

    async def speaks(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "audio/pcm"})
        await response.prepare(request)
        await response.write(b"first")
        async with asyncio.timeout(DEADLINE_S):
            await heard.wait()
        await response.write(b"last")
        return response

    async with (
        running(ScriptedEngine("a", speaks)) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
        client.audio.speech.with_streaming_response.create(model="m", voice="alloy", input="Say it.") as answer,
    ):
        sound = b""
        async for piece in answer.iter_bytes():
            sound += piece
            heard.set()
    assert sound == b"firstlast"


@pytest.mark.parametrize("missing", [answers(404, SGLANG), answers(404, VLLM), answers(404, OURS), answers(405, b"")])
async def test_in_a_mixed_fleet_the_pods_that_know_a_path_are_found(missing: Script) -> None:
    generating = {"/v1/completions": answers(200, b'{"choices":[]}')}
    embedding = {**generating, EMBEDDINGS: answers(200, EMBEDDED)}
    engines = [ScriptedEngine(pod, knows(embedding if pod == "c" else generating, missing)) for pod in "abc"]
    async with running(*engines, retries=2) as gateway:
        for _ in range(9):
            answer = await gateway.post({"model": "m", "input": "x"}, path=EMBEDDINGS)
            assert (answer.status, answer.pod) == (200, "c")
        asked = [sum(one.path == EMBEDDINGS for one in engine.received) for engine in engines]
        assert asked[2] == 9
        assert max(asked[:2]) <= 1, "a pod that does not know the path was asked again"
        pods = {(await gateway.post({"model": "m", "prompt": "x"})).pod for _ in range(3)}
        assert pods == {"a", "b", "c"}, "one path that a pod lacks says nothing about its other paths"
        nowhere = await gateway.post({"model": "m", "input": "x"}, path="/v1/rerank")
        assert nowhere.status in (404, 405)
        again = await gateway.post({"model": "m", "input": "x"}, path="/v1/rerank")
        assert (again.status, again.json["error"]["code"]) == (404, "unknown_path")
        assert "'/v1/rerank'" in again.json["error"]["message"]
        for engine in engines:
            await engine.stop()
        await gateway.wait_pods(0)
        away = await gateway.post({"model": "m", "input": "x"}, path="/v1/rerank")
        assert (away.status, away.json["error"]["code"]) == (503, "no_engine")


async def test_a_model_that_an_engine_does_not_know_is_told_by_the_engine() -> None:
    """The adapter may have been removed there, so another pod that lists it is asked. Nothing is learnt of the path."""
    body = ModelNotFound("model 'm' does not exist", param="model", code="model_not_found").body()
    engines = [ScriptedEngine(pod, answers(404, body)) for pod in "ab"]
    async with running(*engines) as gateway:
        for i in range(1, 5):
            answer = await gateway.post({"model": "m", "input": "x"}, path=EMBEDDINGS)
            assert (answer.status, answer.body) == (404, body)
            assert [len(engine.received) for engine in engines] == [i, i]


async def test_what_was_learnt_of_a_path_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    candidates = Candidates(None, None, None, lambda: now_s)  # type: ignore[arg-type]
    monkeypatch.setattr("router.forwarding.candidates.MAX_LACKS", 3)

    class Asked:
        endpoint = EMBEDDINGS

    for i, pod in enumerate(("a", "b", "c", "a", "d")):
        now_s = float(i)
        candidates.lacks(SimpleNamespace(pod_id=pod, answered=()), Asked())  # type: ignore[arg-type]
    assert candidates.lacking(Asked()) == {"a", "c", "d"}  # type: ignore[arg-type]
    now_s = 2.0 + LACK_TTL_S
    assert candidates.lacking(Asked()) == {"a", "d"}  # type: ignore[arg-type]
    now_s = 4.0 + LACK_TTL_S
    assert candidates.lacking(Asked()) == set()  # type: ignore[arg-type]


async def test_other_paths_pass_if_that_is_allowed() -> None:
    async with running(ScriptedEngine("a", answers(200))) as gateway:
        assert (await gateway.post({"model": "m"}, path="/v1/moderations")).status == 404
    engine = ScriptedEngine("a", answers(200, b'{"ok":1}'))
    async with running(engine, pass_through=True) as gateway:
        passed = await gateway.post({"model": "m", "input": "x"}, path="/v1/moderations")
        assert (passed.status, engine.received[-1].path) == (200, "/v1/moderations")
        unnamed = await gateway.post({"input": "x"}, path="/v1/moderations")
        assert (unnamed.status, unnamed.json["error"]["param"]) == (400, "model")
        for closed in ("/v1/load_lora_adapter", "/v1//x"):
            assert (await gateway.post({"model": "m"}, path=closed)).status == 404
        assert (await gateway.get("/v1/models")).status == 200
    assert len(engine.received) == 1
