"""Non-streamed answers to clients that read slowly or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator

import orjson
import pytest
from aiohttp import web

from router.forwarding.relay import PIECE_BYTES
from router.startup.parts import ADMISSION, FLEET
from tests.router.rig.helpers import Gateway, ScriptedEngine, answers, eventually, running

BODY = os.urandom(16 * 2**20)
IDLE_S = 0.3


@contextlib.asynccontextmanager
async def asking(gateway: Gateway) -> AsyncIterator[asyncio.StreamReader]:
    """A client that has sent a request and reads only when a test does. Its socket buffers little."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE_BYTES)
    client.setblocking(False)
    host, port = gateway.url.removeprefix("http://").split(":")
    await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=client, limit=PIECE_BYTES)
    body = orjson.dumps({"model": "m", "prompt": "x" * 600})
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    try:
        yield reader
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("status", [200, 503])
async def test_a_client_that_does_not_read_is_given_up(status: int) -> None:
    engine = ScriptedEngine("a", answers(status, BODY))
    async with running(engine, idle_timeout_s=IDLE_S, retries=0) as gateway, asking(gateway) as reader:
        await reader.readuntil(b"\r\n\r\n")
        await eventually(lambda: gateway.in_flight == 0)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(len(BODY))
        text = (await gateway.get("/metrics")).body.decode()
    assert 'warmroute_gateway_requests_total{engine="a",policy="round_robin",status="499"} 1.0' in text


async def test_a_slow_client_gets_all_of_it() -> None:
    engine = ScriptedEngine("a", answers(200, BODY))
    async with running(engine, idle_timeout_s=IDLE_S) as gateway, asking(gateway) as reader:
        started_s = asyncio.get_running_loop().time()
        await reader.readuntil(b"\r\n\r\n")
        received = b""
        while len(received) < len(BODY):
            received += await reader.readexactly(len(BODY) // 8)
            await asyncio.sleep(IDLE_S / 4)
        assert received == BODY
        assert asyncio.get_running_loop().time() - started_s > IDLE_S


LARGE = orjson.dumps({"choices": [{"text": "x" * 3 * 2**20}], "usage": {"prompt_tokens": 7, "completion_tokens": 5}})
SMALL = orjson.dumps({"choices": [{"text": "x" * 300_000}]})


async def test_a_large_answer_passes_through_with_its_length_and_teaches_its_usage() -> None:
    engine = ScriptedEngine("a", answers(200, LARGE))
    async with running(engine) as gateway:
        answer = await gateway.post({"model": "m", "prompt": "x" * 600})
        kept = gateway.app[ADMISSION].answer_bytes
    assert (answer.status, answer.body, kept) == (200, LARGE, 0)
    assert answer.headers["Content-Length"] == str(len(LARGE))


async def test_a_large_answer_that_breaks_ends_short_and_counts_against_its_pod() -> None:
    async def breaks(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(LARGE))})
        await response.prepare(request)
        await response.write(LARGE[:-10])
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return response

    engines = [ScriptedEngine(pod, breaks) for pod in "abc"]
    async with running(*engines, retries=0, eject_after=1) as gateway:
        answer = await gateway.post({"model": "m", "prompt": "x" * 600})
        await eventually(lambda: gateway.app[FLEET].ejections == 1)
    assert (answer.status, answer.is_whole) == (200, False)
    assert LARGE.startswith(answer.body)


async def test_answers_that_find_no_room_pass_through_and_give_the_room_back() -> None:
    """Answers to three clients that read nothing fill all the room. Other clients still get their answers."""
    engine = ScriptedEngine("a", answers(200, BODY))
    small = {"model": "m", "prompt": "x"}
    async with running(engine, max_in_flight_answer_mib=1) as gateway, contextlib.AsyncExitStack() as stack:
        admission = gateway.app[ADMISSION]
        for _ in range(3):
            await stack.enter_async_context(asking(gateway))
        await eventually(lambda: admission.in_flight == 3)
        await eventually(lambda: len(engine.received) == 3)
        engine.script = answers(200, SMALL)
        for _ in range(5):
            assert (await gateway.post(small)).body == SMALL
            assert admission.answer_bytes <= 2**20
        assert admission.in_flight == 3


async def test_an_error_without_room_is_the_gateways_own() -> None:
    engine = ScriptedEngine("a", answers(500, b"x" * 2 * 2**20))
    async with running(engine, max_in_flight_answer_mib=1, retries=0) as gateway:
        answer = await gateway.post({"model": "m", "prompt": "x"})
    assert (answer.status, answer.json["error"]["type"]) == (502, "upstream_error")
    assert len(answer.body) < 1000
