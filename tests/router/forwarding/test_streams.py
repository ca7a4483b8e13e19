"""Streams pass through unchanged, and their headers tell why the pod was chosen."""

from __future__ import annotations

import re

import orjson
import pytest

from engine.common.sse import DONE
from engine.contract import headers
from tests.router.rig.helpers import (
    ScriptedEngine,
    answers,
    event,
    running,
    streams,
    usage_event,
)

PROMPT = {"model": "m", "prompt": "x" * 2000, "stream": True}


@pytest.mark.parametrize(
    "chunks",
    [
        [event("a"), event("b"), b"data: [DONE]\n\n"],
        [b"data: {", b'"a": 1}\n', b"\nda", b"ta: [DONE]\n\n"],
        [b"data: 1\r\n\r\n: comment\r\n", b"\r\ndata: [DONE]\r\n\r\n"],
        [event("a"), b"data: [DONE]"],
        [event("\N{GRINNING FACE}\N{HIRAGANA LETTER A}" * 300), DONE],
        [b"data: " + b"y" * 700_000, b"z" * 10, b"\n\n", b"data: [DONE]\n\n"],
        [*(bytes([i % 256]) for i in range(300)), b"\n\n", event("a"), DONE],
    ],
    ids=["events", "split", "crlf", "unfinished", "unicode", "huge event", "any byte"],
)
async def test_stream_is_passed_byte_for_byte(chunks: list[bytes]) -> None:
    async with running(ScriptedEngine("a", streams(chunks))) as gateway:
        answer = await gateway.post(PROMPT)
    assert answer.status == 200
    assert answer.body == b"".join(chunks)


async def test_chunks_are_not_held_back() -> None:
    chunks = [*(event(str(i)) for i in range(4)), DONE]
    engine = ScriptedEngine("a", streams(chunks, gap_s=0.05))
    async with running(engine) as gateway, gateway.session.post(f"{gateway.url}/v1/completions", json=PROMPT) as answer:
        seen = []
        while data := await answer.content.readany():
            seen.append(data)
    assert seen == chunks


async def test_request_reaches_the_engine_untouched() -> None:
    body = b'{ "model":"m" , "messages": [{"role":"user","content":"\xc3\xa4\\u00e4"}], "unknown": 1.50 }'
    engine = ScriptedEngine("a", answers(200))
    sent = {
        "Content-Type": "application/json",
        "Authorization": "Bearer key",
        "traceparent": "00-aa-bb-01",
        "X-Request-Id": "mine",
        "Connection": "X-Private",
        "X-Private": "1",
        "Accept-Encoding": "identity",
    }
    async with running(engine) as gateway:
        answer = await gateway.post(body, path="/v1/chat/completions", **sent)
    (received,) = engine.received
    assert received.body == body
    assert received.path == "/v1/chat/completions"
    for name in ("Content-Type", "Authorization", "traceparent", "X-Request-Id", "Accept-Encoding"):
        assert received.headers[name] == sent[name]
    assert "X-Private" not in received.headers
    assert received.headers["Host"] in engine.url
    assert answer.headers["X-Request-Id"] == "mine"


async def test_answer_says_why() -> None:
    engine = ScriptedEngine(
        "pod-7", streams([event("a"), DONE], extra={headers.CACHED: "11", "OpenAI-Processing-Ms": "kept"})
    )
    async with running(engine, policy="predicted_ttft") as gateway:
        first, second = await gateway.post(PROMPT), await gateway.post(PROMPT)
    assert first.pod == "pod-7"
    assert first.headers[headers.POLICY] == "predicted_ttft"
    assert first.headers[headers.PREDICTED_CACHED] == "0"
    assert int(second.headers[headers.PREDICTED_CACHED]) > 0
    assert first.headers[headers.CACHED] == "11"
    assert first.headers["OpenAI-Processing-Ms"] == "kept"
    assert re.fullmatch("[0-9a-f]{32}", first.headers["X-Request-Id"])
    assert first.headers["X-Request-Id"] != second.headers["X-Request-Id"]


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_other_answers_pass_untouched_and_are_not_retried(status: int) -> None:
    body = orjson.dumps({"error": {"message": "no", "param": "temperature"}})
    pods = [ScriptedEngine(name, answers(status, body, extra={"Location": "/elsewhere"})) for name in "ab"]
    async with (
        running(*pods) as gateway,
        gateway.session.post(
            f"{gateway.url}/v1/completions", json={**PROMPT, "stream": False}, allow_redirects=False
        ) as answer,
    ):
        assert (answer.status, await answer.read()) == (status, body)
        assert answer.headers["Content-Type"] == "application/json"
    assert sum(len(pod.received) for pod in pods) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_usage_in_the_body_wins_over_headers_sent_before_it(stream: bool) -> None:
    counted = {headers.CACHED: "100", headers.PROMPT_TOKENS: "500"}
    usage = usage_event(500, 7, 400)
    script = streams([event("a"), usage, DONE], extra=counted) if stream else answers(200, usage[6:], extra=counted)
    async with running(ScriptedEngine("a", script)) as gateway:
        await gateway.post({**PROMPT, "stream": stream})
        text = (await gateway.get("/metrics")).body.decode()
    assert 'warmroute_gateway_tokens_total{kind="cached",policy="round_robin"} 400.0' in text


async def test_foreign_engine_is_named_by_its_address_and_corrected_by_its_usage() -> None:
    script = streams([event("a"), usage_event(500, 1, 0), b"data: [DONE]\n\n"])
    engine = ScriptedEngine(None, script)
    async with running(engine, policy="cache_aware") as gateway:
        first = await gateway.post(PROMPT)
        await gateway.post(PROMPT)
        text = (await gateway.get("/metrics")).body.decode()
    assert first.pod == engine.url.removeprefix("http://")
    assert 'warmroute_gateway_tokens_total{kind="prompt",policy="cache_aware"} 1000.0' in text
    assert 'warmroute_gateway_tokens_total{kind="cached",policy="cache_aware"} 0.0' in text
