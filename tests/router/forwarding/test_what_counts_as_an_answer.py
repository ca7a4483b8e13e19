"""Through the gateway: an answer begins with its first token and ends with its end mark; anything else is no answer."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from engine.common.sse import DONE, sse_event
from router.fleet import vital_signs
from router.forwarding import silence
from router.startup.parts import FLEET
from tests.router.rig.helpers import (
    DEADLINE_S,
    Answer,
    Gateway,
    Received,
    Script,
    ScriptedEngine,
    answers,
    event,
    eventually,
    running,
    streams,
    usage_event,
)

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}


def delta(reason: str | None = None, **fields: Any) -> bytes:
    return sse_event(orjson.dumps({"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]}))


ROLE = delta(role="assistant", content="")
GOOD = [ROLE, delta(content="good"), delta("stop"), DONE]
KEEP_ALIVES = [b": keep-alive\n\n", ROLE, b"event: ping\ndata: {}\n\n", sse_event(b'{"choices":[]}')]


def hangs(sends: Iterable[bytes], every_s: float = 0.02) -> Script:
    """An engine that hangs, behind a server that goes on to send these."""

    async def play(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        sent = list(sends)
        for number in range(int(DEADLINE_S / every_s)):
            await response.write(sent[number % len(sent)])
            await asyncio.sleep(every_s)
        raise AssertionError("nobody gave up a stream without a token")

    return play


async def asks(gateway: Gateway, **fields: Any) -> Answer:
    return await gateway.post({**ASKED, **fields}, path=CHAT)


@pytest.mark.parametrize("sent", KEEP_ALIVES, ids=["comment", "role", "ping", "empty"])
async def test_a_sign_of_life_is_no_token(sent: bytes) -> None:
    pods = [ScriptedEngine("a", hangs([sent])), ScriptedEngine("b", streams(GOOD))]
    async with running(*pods, first_byte_timeout_s=0.3, eject_after=100) as gateway:
        replies = [await asks(gateway) for _ in range(4)]
        text = (await gateway.get("/metrics")).body.decode()
    assert [(reply.status, reply.pod, reply.body) for reply in replies] == [(200, "b", b"".join(GOOD))] * 4
    assert pods[0].received
    assert f'warmroute_gateway_retries_total{{reason="timeout"}} {len(pods[0].received)}.0' in text


async def test_what_is_learnt_is_the_time_of_the_first_token() -> None:
    def slow(first_s: float) -> Script:
        async def play(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b": keep-alive\n\n" + ROLE)
            await asyncio.sleep(first_s)
            await response.write(b"".join(GOOD[1:]))
            return response

        return play

    pods = [ScriptedEngine("slow", slow(0.4)), ScriptedEngine("fast", slow(0.0))]
    async with running(*pods, policy="predicted_ttft") as gateway:
        for number in range(16):
            await asks(gateway, messages=[{"role": "user", "content": f"{number} " * 600}])
    assert len(pods[1].received) > 2 * len(pods[0].received)


CUTS = {
    "before the first token": [ROLE],
    "in the middle": [ROLE, delta(content="go")],
    "comments alone": [b": keep-alive\n\n"] * 12,
}


@pytest.mark.parametrize("chunks", CUTS.values(), ids=CUTS)
async def test_a_stream_without_its_end_mark_is_broken(chunks: list[bytes]) -> None:
    """It ends in good order, with the last chunk."""
    pods = [ScriptedEngine(name, streams(chunks if name == "a" else GOOD)) for name in "abc"]
    has_text = chunks == CUTS["in the middle"]
    async with running(*pods, eject_after=3) as gateway:
        replies = [await asks(gateway, user=str(number)) for number in range(12)]
        faults = gateway.app[FLEET].pod("a").faults  # type: ignore[arg-type, union-attr]
        assert faults.is_ejected, "a pod that cuts every stream is at fault"
    for reply in replies:
        assert reply.status == 200
        if has_text and reply.pod == "a":
            assert not reply.is_whole
            assert b'"error"' in reply.body
        else:
            assert (reply.is_whole, reply.body) == (True, b"".join(GOOD))


async def test_an_end_mark_is_an_end_though_the_connection_breaks_or_goes_on() -> None:
    async def breaks(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"".join(GOOD))
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return response

    for script in (breaks, hangs([b"".join(GOOD), *[b": ping\n\n"] * 10_000])):
        async with running(ScriptedEngine("a", script), idle_timeout_s=0.3) as gateway:
            answer = await asks(gateway)
            assert (answer.status, answer.is_whole) == (200, True)
            assert answer.body.startswith(b"".join(GOOD))
            assert gateway.app[FLEET].pods("m")[0].faults.count == 0


MODEL_ERROR = b'{"error":{"message":"The model `m` does not exist.","type":"NotFoundError","param":"model","code":404}}'
NO_ANSWERS = {
    "a page": answers(200, b"<html>Welcome</html>", "text/html"),
    "null": answers(200, b"null"),
    "nothing": answers(200, b""),
    "half an object": answers(200, b'{"choices":[{"index":0,"message":{"role":"assist'),
    "an error": answers(200, b'{"error":{"message":"CUDA error","code":500}}'),
    "a reason that is an error": answers(200, b'{"choices":[{"index":0,"finish_reason":"error","message":{}}]}'),
    "a redirect": answers(302, b"", extra={"Location": "http://elsewhere"}),
    "a model that it lists": answers(404, MODEL_ERROR),
    "an unknown coding": answers(200, b"{}", extra={"Content-Encoding": "zstd"}),
    "a damaged coding": answers(200, b"\x1f\x8b not really", extra={"Content-Encoding": "gzip"}),
}


@pytest.mark.parametrize("script", NO_ANSWERS.values(), ids=NO_ANSWERS)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_is_no_answer_is_asked_for_elsewhere(script: Script, is_stream: bool) -> None:
    whole = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"good"},"finish_reason":"stop"}]}'
    good = streams(GOOD) if is_stream else answers(200, whole)
    pods = [ScriptedEngine("a", script), ScriptedEngine("b", good)]
    async with running(*pods, eject_after=100) as gateway:
        replies = [await asks(gateway, stream=is_stream) for _ in range(4)]
    assert pods[0].received
    assert [(reply.status, reply.body) for reply in replies] == [(200, b"".join(GOOD) if is_stream else whole)] * 4
    async with running(ScriptedEngine("a", script)) as gateway:
        alone = await asks(gateway, stream=is_stream)
    assert alone.status in (404, 502)
    assert alone.json["error"]["message"]


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    (tmp_path / "key").write_text("secret")
    return str(tmp_path / "key")


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refusal_of_the_gateways_key_is_no_answer(status: int, key_file: str) -> None:
    refuses = answers(status, b'{"error":"key"}')
    pods = [ScriptedEngine("a", refuses), ScriptedEngine("b", streams(GOOD))]
    async with running(*pods, engine_api_key_file=key_file, eject_after=100) as gateway:
        assert {(await asks(gateway)).status for _ in range(4)} == {200}
    async with running(ScriptedEngine("a", refuses), engine_api_key_file=key_file) as gateway:
        alone = await asks(gateway)
    assert (alone.status, "--engine-api-key-file" in alone.json["error"]["message"]) == (502, True)
    async with running(ScriptedEngine("a", refuses)) as gateway:  # the client's own key went to the engine
        assert (await asks(gateway)).status == status


def compressed(coding: str, body: bytes) -> bytes:
    if coding == "raw deflate":
        packer = zlib.compressobj(wbits=-15)
        return packer.compress(body) + packer.flush()
    return gzip.compress(body) if coding == "gzip" else zlib.compress(body)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "raw deflate"])
async def test_compressed_answers_are_read(coding: str) -> None:
    asked_for: list[str] = []
    packed = compressed(coding, b"".join([*GOOD[:-1], usage_event(150, 3, 100), DONE]))

    async def play(request: web.Request) -> web.StreamResponse:
        asked_for.append(request.headers["Accept-Encoding"])
        fields = {"Content-Type": "text/event-stream", "Content-Encoding": coding.removeprefix("raw ")}
        response = web.StreamResponse(headers=fields)
        await response.prepare(request)
        for at in range(0, len(packed), 7):
            await response.write(packed[at : at + 7])
        return response

    async with running(ScriptedEngine("a", play)) as gateway:
        answer = await asks(gateway)
        text = (await gateway.get("/metrics")).body.decode()
    assert asked_for == ["identity"]
    assert answer.body == b"".join([*GOOD[:-1], usage_event(150, 3, 100), DONE])
    assert "Content-Encoding" not in answer.headers
    assert 'warmroute_gateway_tokens_total{kind="cached",policy="round_robin"} 100.0' in text


async def test_one_gzipped_404_closes_no_path() -> None:
    """A 404 for one adapter; and a path that was answered before is known, whatever a 404 says."""
    refuses = True

    async def play(request: web.Request) -> web.StreamResponse:
        if refuses:
            return await answers(404, body, extra=extra)(request)
        return await streams(GOOD)(request)

    engine = ScriptedEngine("a", play)
    async with running(engine) as gateway:
        body, extra = gzip.compress(MODEL_ERROR), {"Content-Encoding": "gzip"}
        assert (await asks(gateway)).status == 404
        body, extra = b"\x1f\x8b\x00 not readable", {}
        assert (await asks(gateway)).status == 404
        refuses = False
        assert (await asks(gateway)).status == 200
        refuses, body = True, b'{"detail":"Not Found"}'
        assert (await asks(gateway)).status == 404
        refuses = False
        assert (await asks(gateway)).status == 200


async def test_a_hedge_cuts_no_stream_that_has_begun() -> None:
    chunks = [ROLE, *[delta(content="x")] * 20, delta("stop"), DONE]
    pods = [ScriptedEngine(name, streams(chunks, gap_s=0.02)) for name in "ab"]
    async with running(*pods, hedge_after_s=0.1) as gateway:
        replies = await asyncio.gather(*[asks(gateway) for _ in range(20)])
        text = (await gateway.get("/metrics")).body.decode()
    assert {(reply.status, reply.is_whole, reply.body) for reply in replies} == {(200, True, b"".join(chunks))}
    assert sum(len(pod.received) for pod in pods) == 20
    assert 'hedges_total{outcome="won"} 0.0' in text


class Counting(ScriptedEngine):
    """An engine that is silent within every stream, and counts its tokens as vLLM does."""

    def __init__(self, pod: str, script: Script, made_per_s: float | None) -> None:
        super().__init__(pod, script)
        self.made_per_s = made_per_s

    def _more_routes(self, app: web.Application) -> None:
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        if self.made_per_s is None:
            return web.Response(status=404)
        made = 1000 + self.made_per_s * asyncio.get_running_loop().time()
        return web.Response(text=f'vllm:generation_tokens_total{{model_name="m"}} {made}\n')


def holds_back(silent_s: float) -> Script:
    """A parser that holds back the argument of a tool call."""

    async def play(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(ROLE + delta(content="a"))
        for _ in range(int(silent_s / 0.05)):
            await asyncio.sleep(0.05)
            await response.write(b": keep-alive\n\n")
        await response.write(delta(content="b") + delta("stop") + DONE)
        return response

    return play


@pytest.mark.parametrize(
    ("made_per_s", "silent_s", "goes_on"),
    [(50.0, 1.5, True), (0.0, 10.0, False), (None, 0.45, True), (None, 10.0, False)],
    ids=["makes tokens", "stands", "says it is well, once", "says it is well, for ever"],
)
async def test_a_pod_is_asked_before_its_silent_stream_is_given_up(
    monkeypatch: pytest.MonkeyPatch, made_per_s: float | None, silent_s: float, goes_on: bool
) -> None:
    monkeypatch.setattr(vital_signs.VitalSigns.__init__, "__defaults__", (None, 0.05))
    engine = Counting("a", holds_back(silent_s), made_per_s)
    async with running(engine, idle_timeout_s=0.3) as gateway:
        answer = await asyncio.wait_for(asks(gateway), 8)
    assert answer.is_whole is goes_on
    assert (b'"content":"b"' in answer.body) is goes_on
    assert (b'"error"' in answer.body) is not goes_on


async def test_a_pod_that_is_full_keeps_its_place_in_the_queue() -> None:
    """The first token takes longer than the limit on each pod: one pod works on it, and no other is asked."""
    waiting = asyncio.Event()

    async def full(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if b"late" not in body:
            return await streams([*GOOD[:2], *[delta(content="x")] * 30, *GOOD[2:]], gap_s=0.05)(request)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(0.9)
        waiting.set()
        await response.write(b"".join(GOOD))
        return response

    pods = [ScriptedEngine(name, full) for name in "ab"]
    async with running(*pods, first_byte_timeout_s=0.3) as gateway:
        others = [asyncio.create_task(asks(gateway)) for _ in range(4)]
        await eventually(lambda: sum(pod.open for pod in pods) == 4)
        await asyncio.sleep(0.15)
        answer = await asks(gateway, messages=[{"role": "user", "content": "late"}])
        await asyncio.gather(*others)
    assert (answer.status, answer.body) == (200, b"".join(GOOD))
    assert waiting.is_set()
    assert sum(b"late" in got.body for pod in pods for got in pod.received) == 1


def late(pods: Iterable[ScriptedEngine]) -> list[Received]:
    return [got for pod in pods for got in pod.received if b"late" in got.body]


async def test_a_pod_that_hangs_is_left_for_another_that_works() -> None:
    pods = [ScriptedEngine("a", hangs(KEEP_ALIVES)), ScriptedEngine("b", streams(GOOD))]
    async with running(*pods, first_byte_timeout_s=0.3, eject_after=100) as gateway:
        assert {(await asks(gateway)).pod for _ in range(3)} == {"b"}
    assert silence.FRESH_SHARE < 1


async def test_a_usage_in_tiny_pieces_is_counted() -> None:
    end = b"".join([event("x"), usage_event(150, 3, 100), DONE, b": " + b"x" * 6000 + b"\n\n"])

    async def play(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for at in range(0, len(end), 3):
            await response.write(end[at : at + 3])
        return response

    async with running(ScriptedEngine("a", play)) as gateway:
        answer = await gateway.post({"model": "m", "prompt": "x", "stream": True})
        text = (await gateway.get("/metrics")).body.decode()
    assert answer.body == end
    assert 'warmroute_gateway_tokens_total{kind="cached",policy="round_robin"} 100.0' in text
