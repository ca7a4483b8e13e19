"""Bodies: how many bytes of bodies may be in flight, and how images in them count."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import random
import re
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from engine.common.settings import ConfigError
from router.settings.gateway import GatewaySettings
from router.startup.parts import ADMISSION, FLEET, INDEX
from tests.router.rig.helpers import (
    Answer,
    Gateway,
    ScriptedEngine,
    event,
    eventually,
    running,
    stalls_after,
    streams,
    usage_event,
)

MIB = 2**20
GOOD = streams([event("fine"), b"data: [DONE]\n\n"])
PATH = "/v1/completions"
BOUND = {"max_in_flight_body_mib": 2, "max_body_bytes": 2 * MIB}


def body_of(size: int) -> bytes:
    """Return a request body of exactly `size` bytes."""
    fields: dict[str, Any] = {"model": "m", "stream": True, "prompt": ""}
    return orjson.dumps({**fields, "prompt": "x" * (size - len(orjson.dumps(fields)))})


async def in_pieces(body: bytes) -> AsyncIterator[bytes]:
    """Yield the body chunked, without an announced length."""
    for at in range(0, len(body), 2**16):
        yield body[at : at + 2**16]


async def send(gateway: Gateway, data: Any, **sent: str) -> Answer:
    async with gateway.session.post(gateway.url + PATH, data=data, headers=sent) as response:
        return Answer(response.status, response.headers.copy(), await response.read())


@contextlib.asynccontextmanager
async def held(gateway: Gateway, engine: ScriptedEngine, size: int) -> AsyncIterator[None]:
    """Keep a request's body of `size` bytes in flight during the block."""
    engine.script = stalls_after([event("a")])
    call = asyncio.create_task(gateway.post(body_of(size)))
    await eventually(lambda: engine.open == 1)
    engine.script = GOOD
    try:
        yield
    finally:
        call.cancel()
        await eventually(lambda: gateway.in_flight == 0)


async def test_bodies_beyond_the_bound_are_refused_and_those_that_fit_are_not() -> None:
    engine = ScriptedEngine("a", GOOD)
    async with running(engine, **BOUND) as gateway:
        async with held(gateway, engine, MIB):
            assert gateway.app[ADMISSION].body_bytes == MIB
            refused = await asyncio.gather(*(gateway.post(body_of(MIB + 1)) for _ in range(5)))
            fitting = await gateway.post(body_of(MIB))
        again = await gateway.post(body_of(2 * MIB))
        text = (await gateway.get("/metrics")).body.decode()
    assert {(a.status, a.headers["Retry-After"], a.json["error"]["code"]) for a in refused} == {
        (429, "1", "overloaded")
    }
    assert re.search(r"take (1\.\d|2\.0) of 2 MiB", refused[0].json["error"]["message"])
    assert (fitting.status, again.status) == (200, 200)
    assert 'warmroute_gateway_requests_total{engine="",policy="",status="429"} 5.0' in text
    assert len(engine.received) == 3


async def test_unannounced_and_compressed_bodies_count_as_they_come() -> None:
    engine = ScriptedEngine("a", GOOD)
    zipped = gzip.compress(body_of(3 * MIB // 2))
    assert len(zipped) < 100_000
    async with running(engine, **BOUND) as gateway:
        async with held(gateway, engine, MIB):
            large = await send(gateway, in_pieces(body_of(3 * MIB // 2)))
            inflated = await send(gateway, zipped, **{"Content-Encoding": "gzip"})
            fitting = await send(gateway, in_pieces(body_of(MIB - 1)))
        assert (await send(gateway, in_pieces(body_of(3 * MIB // 2)))).status == 200
        assert (await send(gateway, zipped, **{"Content-Encoding": "gzip"})).status == 200
        too_large = await send(gateway, in_pieces(body_of(2 * MIB + 1)))
    assert (large.status, inflated.status, fitting.status, too_large.status) == (429, 429, 200, 413)


@pytest.mark.parametrize("head", [b"Content-Length: 2097152", b"Transfer-Encoding: chunked"])
async def test_a_client_that_leaves_while_it_sends_gives_its_bytes_back(head: bytes) -> None:
    engine = ScriptedEngine("a", GOOD)
    async with running(engine, **BOUND) as gateway:
        admission = gateway.app[ADMISSION]
        for _ in range(3):
            _, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
            piece = body_of(100_000)
            if b"chunked" in head:
                piece = b"%x\r\n" % len(piece) + piece + b"\r\n"
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + head + b"\r\n\r\n" + piece)
            await eventually(lambda: admission.body_bytes == 100_000)
            writer.transport.abort()
            await eventually(lambda: admission.body_bytes == 0)
        assert (await gateway.post(body_of(2 * MIB))).status == 200
    assert len(engine.received) == 1


async def test_a_body_that_is_refused_for_another_reason_gives_its_bytes_back() -> None:
    engine = ScriptedEngine("a", GOOD)
    async with running(engine, **BOUND, total_timeout_s=0.3) as gateway:
        for body, status in ((b"[" * MIB, 400), (body_of(2 * MIB + 1), 413), (body_of(1000), 200)):
            assert (await gateway.post(body)).status == status
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9999\r\n\r\n")
        assert b" 408 " in await reader.readline()
        writer.close()
        assert gateway.app[ADMISSION].body_bytes == 0


async def test_explaining_is_bounded_too() -> None:
    engine = ScriptedEngine("a", GOOD)
    async with running(engine, **BOUND) as gateway, held(gateway, engine, MIB):
        large = await gateway.post(body_of(MIB + 1), path="/v1/route/explain")
        fitting = await gateway.post(body_of(MIB), path="/v1/route/explain")
    assert (large.status, fitting.status) == (429, 200)


def test_the_bound_has_room_for_the_largest_body() -> None:
    flags = ["--engines", "http://a", "--max-in-flight-body-mib", "8"]
    with pytest.raises(ConfigError, match=r"--max-in-flight-body-mib 8 .* --max-body-bytes 16777216"):
        GatewaySettings.load(flags, prog="warmroute-gateway", environ={})
    assert GatewaySettings.load([*flags, "--max-body-bytes", "8388608"], prog="warmroute-gateway", environ={})


def chat(text: str, *images: str) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    parts += [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}} for image in images]
    return {"model": "m", "stream": True, "messages": [{"role": "user", "content": parts}]}


async def test_an_image_counts_as_an_image_and_leaves_other_prompts_alone() -> None:
    image = base64.b64encode(random.Random(1).randbytes(3 * MIB)).decode()
    other = f"{image[:-8]}AAAAAAA="
    engine = ScriptedEngine("a", streams([event("fine"), usage_event(1206, 5, 0), b"data: [DONE]\n\n"]))
    async with running(engine, policy="predicted_ttft") as gateway:
        chats, explain, index = "/v1/chat/completions", "/v1/route/explain", gateway.app[INDEX]
        (pod,) = gateway.app[FLEET].pods("m")
        for i in range(40):
            assert (await gateway.post(chat(f"{i} " * 1000), path=chats)).status == 200
        known, cost = index.statistics().speculative, pod.state.cost
        assert (await gateway.post(chat("Describe this.", image), path=chats)).status == 200
        assert 10 < index.statistics().speculative - known < 20
        assert pod.state.cost.token_s > cost.token_s / 50, "by the image's bytes, tokens would look cheap"
        told = (await gateway.post(chat("Describe this.", image), path=explain)).json
        another = (await gateway.post(chat("Describe this.", other), path=explain)).json
        text = (await gateway.post(chat("0 " * 1000), path=explain)).json
    assert 1024 < told["prompt_tokens_estimated"] < 1064
    assert told["ttft_predicted_s"] < 2
    assert told["cached_tokens_predicted"] > 900
    assert another["cached_tokens_predicted"] == 0
    assert text["cached_tokens_predicted"] > 0.8 * text["prompt_tokens_estimated"]


async def test_the_keys_of_one_request_leave_room_for_those_of_others() -> None:
    engine = ScriptedEngine("a", GOOD)
    async with running(engine, policy="cache_aware") as gateway:
        others = [{"model": "m", "stream": True, "prompt": f"{i} " * 2000} for i in range(20)]
        for fields in others:
            await gateway.post(fields)
        assert (await gateway.post({"model": "m", "stream": True, "prompt": "x" * 9 * MIB})).status == 200
        assert gateway.app[INDEX].statistics().speculative < 32_768 / 7
        told = [(await gateway.post(fields, path="/v1/route/explain")).json for fields in others]
    assert all(one["cached_tokens_predicted"] > 0.8 * one["prompt_tokens_estimated"] for one in told)
