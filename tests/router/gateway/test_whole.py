"""Answers that are not streams, towards clients that read slowly or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator

import orjson
import pytest

from router.gateway.relay import PIECE_BYTES
from tests.router.gateway.helpers import Gateway, ScriptedEngine, answers, eventually, running

BODY = os.urandom(16 * 2**20)
IDLE_S = 0.3


@contextlib.asynccontextmanager
async def asking(gateway: Gateway) -> AsyncIterator[asyncio.StreamReader]:
    """A client that has sent a request and reads only when told to; its socket holds little."""
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
