"""Which connection a request uses, on real sockets, with and without TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvloop

import engine.common.http.pool
import loadgen.load.client
from loadgen.load.client import Client
from loadgen.load.target import Target
from loadgen.measure.records import RequestRecord
from tests.conftest import wait_until
from tests.loadgen.load.scripted_server import (
    STREAM_HEAD,
    Request,
    ScriptedServer,
    answer_well,
    chunk,
    saying,
    word,
)

MESSAGES = [{"role": "user", "content": "hello"}]


async def send(client: Client) -> RequestRecord:
    return (await client.send(client.call(MESSAGES, 1)))[0]


async def test_one_request_after_the_other_uses_one_connection() -> None:
    server = ScriptedServer(answer_well)
    async with server.running() as url, Client(Target(url, model="m")) as client:
        for _ in range(5):
            assert (await send(client)).failure is None
    assert (server.connections, len(server.requests)) == (1, 5)
    assert server.open == 0


async def test_requests_at_once_have_a_connection_each_and_leave_them_to_the_next() -> None:
    everyone = asyncio.Barrier(4)

    async def script(request: Request, writer: asyncio.StreamWriter) -> None:
        await everyone.wait()
        await answer_well(request, writer)

    server = ScriptedServer(script)
    async with server.running() as url, Client(Target(url, model="m")) as client:
        for _ in range(3):
            records = await asyncio.gather(*(send(client) for _ in range(4)))
            assert [record.failure for record in records] == [None] * 4
    assert server.connections == 4


async def test_a_failed_request_does_not_spoil_the_next() -> None:
    async def script(request: Request, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) == 1:
            writer.write(STREAM_HEAD + chunk(word("a")))  # and nothing more
        else:
            await answer_well(request, writer)

    server = ScriptedServer(script)
    async with server.running() as url, Client(Target(url, model="m", timeout_s=0.3)) as client:
        assert (await send(client)).failure == "timeout"
        assert (await send(client)).failure is None
    assert server.connections == 2


async def test_a_connection_that_the_server_closed_in_time_is_not_used_again() -> None:
    async def script(request: Request, writer: asyncio.StreamWriter) -> None:
        await answer_well(request, writer)
        await writer.drain()
        writer.close()

    server = ScriptedServer(script)
    async with server.running() as url, Client(Target(url, model="m")) as client:
        for _ in range(3):
            assert (await send(client)).failure is None
            await wait_until(lambda: all(one.closed for one in client._pool._idle), what="the closing")
        assert client.stale_connections == 0
    assert server.connections == 3


async def test_a_request_that_crossed_the_closing_of_its_connection_is_sent_again() -> None:
    async def script(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.connection == 0 and len(server.requests) == 2:
            writer.close()  # as if the server had closed the idle connection before the request came
        else:
            await answer_well(request, writer)

    server = ScriptedServer(script)
    async with server.running() as url, Client(Target(url, model="m")) as client:
        await send(client)
        record = await send(client)
        assert record.failure is None
        assert client.stale_connections == 1
    assert [request.connection for request in server.requests] == [0, 0, 1]


@pytest.mark.parametrize("answered", [True, False])
async def test_a_used_connection_lost_later_or_after_a_byte_is_a_failure(
    answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not answered:
        monkeypatch.setattr(loadgen.load.client, "STALE_S", 0.0)  # any loss comes too late for a retry

    async def script(request: Request, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) == 1:
            await answer_well(request, writer)
        else:
            writer.write(b"H" if answered else b"")
            writer.close()

    server = ScriptedServer(script)
    async with server.running() as url, Client(Target(url, model="m")) as client:
        await send(client)
        assert (await send(client)).failure == "disconnected"
        assert client.stale_connections == 0
    assert len(server.requests) == 2


async def test_a_fresh_connection_that_is_lost_is_a_failure_at_once() -> None:
    server = ScriptedServer(saying(close=True))
    async with server.running() as url, Client(Target(url, model="m")) as client:
        assert (await send(client)).failure == "disconnected"
    assert len(server.requests) == 1


async def test_idle_connections_are_given_up_before_servers_close_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.common.http.pool, "KEPT_S", 0.0)
    server = ScriptedServer(answer_well)
    async with server.running() as url, Client(Target(url, model="m")) as client:
        for _ in range(3):
            assert (await send(client)).failure is None
        await wait_until(lambda: server.open <= 2, what="the end of old connections")
    assert server.connections == 3


async def test_a_name_with_several_addresses_finds_the_one_that_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ScriptedServer(answer_well)

    async def found(host: str, port: int, **kwargs: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port)) for address in ("127.0.0.2", "127.0.0.1")]

    async with server.running() as url, Client(Target(url.replace("127.0.0.1", "many.test"), model="m")) as client:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
        assert [(await send(client)).failure for _ in range(2)] == [None, None]


# -- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ca_file(authority: trustme.CA, tmp_path: Path) -> str:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return str(tmp_path / "ca.pem")


@pytest.fixture
def server_tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


async def test_https_with_a_private_authority(server_tls: ssl.SSLContext, ca_file: str) -> None:
    server = ScriptedServer(answer_well)
    async with server.running(server_tls) as url, Client(Target(url, tls_ca_file=ca_file)) as client:
        assert await client.model_id() == "scripted"
        assert [(await send(client)).failure for _ in range(3)] == [None] * 3
    assert server.connections == 1


async def test_https_with_an_unknown_certificate_is_refused_unless_asked_otherwise(server_tls: ssl.SSLContext) -> None:
    server = ScriptedServer(answer_well)
    async with server.running(server_tls) as url:
        async with Client(Target(url, model="m")) as client:
            record = await send(client)
            assert record.failure == "connect"
            assert "CERTIFICATE_VERIFY_FAILED" in record.detail
        async with Client(Target(url, model="m", tls_verify=False)) as client:
            assert (await send(client)).failure is None


async def test_http_to_a_tls_port_is_a_failure(server_tls: ssl.SSLContext) -> None:
    server = ScriptedServer(answer_well)
    async with server.running(server_tls) as url, Client(Target(url.replace("https", "http"), model="m")) as client:
        assert (await send(client)).failure in ("disconnected", "bad answer")


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_cancelled_at_any_moment_of_connecting_nothing_stays_open(new_loop: Any) -> None:
    """Closing the client waits until it has no connection. If it kept one by mistake, this wait would time out."""

    async def play() -> None:
        server = ScriptedServer(answer_well)
        async with server.running() as url:
            for turns in range(12):
                async with (
                    asyncio.timeout(engine.common.http.pool.CLOSE_S - 1),
                    Client(Target(url, model="m")) as client,
                ):
                    task = asyncio.create_task(send(client))
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            await wait_until(lambda: server.open == 0, 10, "the end of all connections")

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(play())
