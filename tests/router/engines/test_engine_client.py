"""The client for engines on real sockets: ended connections, stalled bodies, and which requests are sent again."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine.common.http.target import Target
from router.engines import engine_client
from router.engines.engine_client import (
    READ_AHEAD_BYTES,
    Answer,
    BrokeOff,
    ConnectTimedOut,
    EngineClient,
    NotConnected,
)
from tests.loadgen.load.scripted_server import Request, Script, ScriptedServer, plain
from tests.router.rig.helpers import DEADLINE_S, eventually

BODY = b'{"model": "m"}'
GOOD = plain(200, b"fine")


async def answers_well(request: Request, writer: asyncio.StreamWriter) -> None:
    writer.write(GOOD)


class Asking:
    """A client and the server that it asks."""

    def __init__(self, client: EngineClient, server: ScriptedServer, url: str) -> None:
        self.client = client
        self.server = server
        self.target = Target.of(f"{url}/v1/completions")
        self.sent = 0

    async def post(self, body: bytes = BODY, *, timeout_s: float = DEADLINE_S) -> Answer:
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        return await self.client.post(self.target, b"X-A: 1\r\n", body, self._on_sent, deadline_s)

    async def read(self, body: bytes = BODY) -> tuple[int, bytes]:
        """The status and the whole of an answer."""
        answer, data = await self.post(body), b""
        try:
            while piece := await answer.readany():
                data += piece
        finally:
            answer.close()
        return answer.status, data

    def _on_sent(self) -> None:
        self.sent += 1


@contextlib.asynccontextmanager
async def asking(script: Script, *, connect_timeout_s: float = DEADLINE_S) -> AsyncIterator[Asking]:
    server = ScriptedServer(script)
    async with server.running() as url:
        client = EngineClient(None, connect_timeout_s)
        try:
            yield Asking(client, server, url)
        finally:
            await client.close()
        await eventually(lambda: server.open == 0)
        assert client.connections == 0


async def test_a_request_says_where_it_goes_and_how_long_it_is() -> None:
    async with asking(answers_well) as asked:
        assert await asked.read() == (200, b"fine")
        (request,) = asked.server.requests
        authority = f"127.0.0.1:{asked.server.port}"
    assert (request.method, request.path, request.body) == ("POST", "/v1/completions", BODY)
    assert {name.lower(): value for name, value in request.headers.items()} == {
        "host": authority,
        "x-a": "1",
        "content-length": str(len(BODY)),
    }


@pytest.mark.parametrize(
    ("url", "authority", "path"),
    [
        ("http://10.0.0.7:8000/v1/x", "10.0.0.7:8000", "/v1/x"),
        ("http://h/v1/x", "h", "/v1/x"),
        ("https://h:443/base/v1/x", "h", "/base/v1/x"),
        ("https://h:8443/v1/x", "h:8443", "/v1/x"),
        ("http://[::1]:80/v1/x", "[::1]", "/v1/x"),
        ("http://[::1]:8000/v1/x", "[::1]:8000", "/v1/x"),
    ],
)
def test_targets(url: str, authority: str, path: str) -> None:
    target = Target.of(url)
    assert target.authority == authority
    assert target.head == f"POST {path} HTTP/1.1\r\nHost: {authority}\r\n".encode()
    assert target.host.strip("[]") == target.host


@pytest.mark.parametrize("url", ["unix:///x", "h:80", "http://"])
def test_what_is_no_target_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not http"):
        Target.of(url)


async def test_a_kept_connection_that_ends_as_it_is_used_costs_a_second_sending_and_no_error() -> None:
    async def script(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.connection == 0 and len(asked.server.requests) == 2:
            writer.close()  # as if the engine had closed the idle connection before it saw the request
        else:
            writer.write(GOOD)

    async with asking(script) as asked:
        assert [await asked.read() for _ in range(3)] == [(200, b"fine")] * 3
        assert [request.connection for request in asked.server.requests] == [0, 0, 1, 1]
        assert asked.sent == 3


@pytest.mark.parametrize("said", [b"", b"H"])
async def test_nothing_is_sent_twice_that_may_have_been_read(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is not sent again if its connection is lost late, or after a byte of the answer, or was a new one."""
    if not said:
        monkeypatch.setattr(engine_client, "STALE_S", -1.0)  # even an immediate end of the connection is too late

    async def script(request: Request, writer: asyncio.StreamWriter) -> None:
        if len(asked.server.requests) == 2:
            writer.write(said)
            writer.close()
        elif len(asked.server.requests) == 3:
            writer.close()
        else:
            writer.write(GOOD)

    async with asking(script) as asked:
        await asked.read()
        for _ in range(2):
            with pytest.raises(BrokeOff):
                await asked.read()
        assert await asked.read() == (200, b"fine")
        assert len(asked.server.requests) == 4


async def test_a_request_that_ends_its_engine_is_not_taken_for_an_engine_that_was_away() -> None:
    """An unreachable engine does not count as failed. So if this engine were reported as unreachable, the request would
    be sent to the next one, and end it, too."""

    async def script(request: Request, writer: asyncio.StreamWriter) -> None:
        if len(asked.server.requests) == 1:
            writer.write(GOOD)
        else:
            listening.close()
            writer.transport.abort()

    async with asking(script) as asked:
        server = asked.server
        listening = await asyncio.start_server(server._serve, "127.0.0.1", 0)
        asked.target = Target.of(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1/completions")
        await asked.read()
        with pytest.raises(BrokeOff):
            await asked.read()
        with pytest.raises(NotConnected):
            await asked.read()


async def test_an_early_answer_to_a_large_body_is_read() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(plain(413, b"too large"))
        await writer.drain()
        await reader.read(2**16)  # read a little, and no more
        await over.wait()
        writer.close()

    over = asyncio.Event()
    listening = await asyncio.start_server(serve, "127.0.0.1", 0, limit=2**16)
    async with asking(answers_well) as asked:
        asked.target = Target.of(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/")
        assert await asked.read(b"x" * 2**24) == (413, b"too large")
        await eventually(lambda: asked.client.connections == 0)  # the rest of the body will not come
        over.set()
    listening.close()


async def test_little_is_read_ahead_of_an_answer_that_nobody_reads() -> None:
    body = bytes(range(256)) * 2**13

    async def script(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(plain(200, body))
        await writer.drain()

    async with asking(script) as asked:
        answer = await asked.post()
        answer.set_deadline(None)
        await asyncio.sleep(0.1)
        assert answer._size <= 2 * READ_AHEAD_BYTES + 2**18 < len(body)  # plus what one read brings
        data = b""
        while piece := await answer.readany():
            data += piece
            await asyncio.sleep(0)
        assert data == body
        await eventually(lambda: len(asked.client._pools[next(iter(asked.client._pools))]._idle) == 1)


@pytest.mark.parametrize("how", ["cancelled", "too late", "closed"])
async def test_what_is_given_up_closes_its_connection(how: str) -> None:
    async def script(request: Request, writer: asyncio.StreamWriter) -> None:
        if how == "closed":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe")
        await writer.drain()

    async with asking(script) as asked:
        if how == "too late":
            with pytest.raises(TimeoutError):
                await asked.post(timeout_s=0.05)
        elif how == "closed":
            (await asked.post()).close()
        else:
            asks = asyncio.create_task(asked.post())
            await eventually(lambda: len(asked.server.requests) == 1)
            asks.cancel()
            await asyncio.wait((asks,))
        await eventually(lambda: asked.server.open == 0)
        assert asked.client.connections == 0


async def test_what_came_before_a_break_is_read_before_the_break() -> None:
    async def script(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe")
        await writer.drain()
        writer.close()

    async with asking(script) as asked:
        answer = await asked.post()
        await eventually(lambda: asked.client.connections == 0)
        assert await answer.readany() == b"he"
        for _ in range(2):
            with pytest.raises(BrokeOff, match="closed the connection"):
                await answer.readany()


async def test_a_lack_of_descriptors_keeps_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*args: Any) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    async with asking(answers_well) as asked:
        with monkeypatch.context() as patched:
            patched.setattr(socket, "socket", none_left)
            with pytest.raises(NotConnected) as raised:
                await asked.post()
        assert raised.value.errno == errno.EMFILE
        assert await asked.read() == (200, b"fine")


async def test_an_engine_that_does_not_accept_is_given_up_in_time() -> None:
    full = socket.create_server(("127.0.0.1", 0), backlog=0)
    queued = [socket.socket() for _ in range(4)]
    for waiting in queued:
        waiting.setblocking(False)
        waiting.connect_ex(full.getsockname())
    async with asking(answers_well, connect_timeout_s=0.2) as asked:
        asked.target = Target.of(f"http://127.0.0.1:{full.getsockname()[1]}/")
        with pytest.raises(ConnectTimedOut):
            await asked.post()
        with pytest.raises(TimeoutError):
            await asked.post(timeout_s=0.05)
    for one in (full, *queued):
        one.close()


async def test_connections_are_opened_ahead_of_need_and_forgotten_with_their_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_client, "KEEP_EVERY_S", 0.01)
    everyone = asyncio.Barrier(8)

    async def script(request: Request, writer: asyncio.StreamWriter) -> None:
        await everyone.wait()
        writer.write(GOOD.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))

    async with asking(script) as asked:
        with monkeypatch.context() as patched:
            patched.setattr(engine_client, "FADES", 1.0)
            keeping = asyncio.create_task(asked.client.keep())
            for _ in range(2):
                await asyncio.gather(*(asked.read() for _ in range(8)))
                await eventually(lambda: sum(len(pool._fresh) for pool in asked.client._pools.values()) >= 8)
                made = asked.server.connections
            await asyncio.gather(*(asked.read() for _ in range(8)))
            assert {request.connection for request in asked.server.requests[-8:]} <= set(range(made))
        monkeypatch.setattr(engine_client, "FADES", 0.0)
        for pool in asked.client._pools.values():
            await pool.close()
        await eventually(lambda: not asked.client._pools)
        keeping.cancel()
        await asyncio.wait((keeping,))


async def test_ipv6() -> None:
    try:
        listening = await asyncio.start_server(ScriptedServer(answers_well)._serve, "::1", 0)
    except OSError:
        pytest.skip("no IPv6 on this machine")
    async with asking(answers_well) as asked:
        asked.target = Target.of(f"http://[::1]:{listening.sockets[0].getsockname()[1]}/")
        assert await asked.read() == (200, b"fine")
    listening.close()
