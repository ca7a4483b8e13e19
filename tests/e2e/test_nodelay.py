"""TCP_NODELAY on the sockets of engine, load generator and Redis clients.

`tests/router/forwarding` checks the gateway.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any
from unittest.mock import patch

import aiohttp
import pytest
import uvloop
from aiohttp.web_protocol import RequestHandler

from engine.common.redis_client import connect
from engine.loop.metrics import EngineMetrics
from engine.server.service import ServerState
from engine.startup.app import listening
from engine.startup.settings import EngineSettings
from loadgen.load.client import Client
from loadgen.load.target import Target
from tests.loadgen.load.scripted_server import ScriptedServer, answer_well
from tests.redis_server import RedisServer

Loop = Callable[[], asyncio.AbstractEventLoop]
LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


def run(loop: Loop, main: Coroutine[None, None, None]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main)


def is_set(transport: asyncio.BaseTransport | None) -> bool:
    assert transport is not None
    return bool(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))


@LOOPS
def test_engine(loop: Loop, tmp_path: Any) -> None:
    found: list[bool] = []

    class Looked(RequestHandler):
        def data_received(self, data: bytes) -> None:
            found.append(is_set(self.transport))
            super().data_received(data)

    async def main() -> None:
        settings = EngineSettings(model=tmp_path, device="sim", port=0)
        with patch("aiohttp.web_server.RequestHandler", Looked):
            async with (
                listening(settings, ServerState(), EngineMetrics("m")) as ports,
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{ports.clients}/health"),
            ):
                pass

    run(loop, main())
    assert found == [True]


@LOOPS
def test_load_generator(loop: Loop) -> None:
    async def main() -> None:
        async with ScriptedServer(answer_well).running() as url, Client(Target(url, model="m")) as client:
            record, _ = await client.send(client.call([{"role": "user", "content": "hello"}], 1))
            assert record.failure is None
            assert [is_set(connection.transport) for connection in client._pool._open] == [True]

    run(loop, main())


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(2**16):
        writer.write(data)
    writer.close()


@LOOPS
def test_redis_clients(loop: Loop, redis_server: RedisServer) -> None:
    """The tests' Redis has no TCP port, so a relay listens on one."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_redis, to_redis = await asyncio.open_unix_connection(redis_server.url.removeprefix("unix://"))
        await asyncio.gather(pump(reader, to_redis), pump(from_redis, writer))

    async def main() -> None:
        async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
            async with connect(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}") as redis:
                await redis.ping()
                (connection,) = redis.connection_pool._available_connections
                assert connection._writer is not None
                assert is_set(connection._writer.transport)
            await asyncio.sleep(0.05)

    run(loop, main())

    run(loop, main())
