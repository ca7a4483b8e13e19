"""Clients that are slow in their TLS handshake: they are counted and ended, and do not disturb others."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
import uvloop
from aiohttp import web

from router.edge.tls import Certificate, client_context
from router.startup.parts import CONNECTIONS
from router.startup.serving import make_runner
from tests.router.rig.helpers import DEADLINE_S, app_of, eventually
from tests.router.rig.raw_client import GET_HEALTH, GET_MODELS

LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
Loop = Callable[[], asyncio.AbstractEventLoop]


@pytest.fixture
def no_blocking_calls() -> None:
    """Allow blocking calls, because certificates are read when a gateway starts."""


@contextlib.asynccontextmanager
async def opened(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection without TLS; cut at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@dataclass(frozen=True)
class Secure:
    """A gateway that serves https."""

    app: web.Application
    port: int
    authority: trustme.CA

    @property
    def connections(self) -> int:
        return len(self.app[CONNECTIONS].open)

    async def ask(self, request: bytes) -> bytes:
        """Return the answer to a request that is sent together with the end of the handshake."""
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = context.wrap_bio(received, sent, server_hostname="gateway.test")
        async with opened(self.port) as (reader, writer), asyncio.timeout(DEADLINE_S):
            while True:
                with contextlib.suppress(ssl.SSLWantReadError):
                    client.do_handshake()
                    break
                writer.write(sent.read())
                received.write(await reader.read(2**16))
            client.write(request)
            writer.write(sent.read())
            answer = b""
            while b"\r\n\r\n" not in answer:
                with contextlib.suppress(ssl.SSLWantReadError):
                    answer += client.read()
                    continue
                received.write(await reader.read(2**16))
            return answer


@contextlib.asynccontextmanager
async def secure(folder: Path, **settings: float) -> AsyncIterator[Secure]:
    authority = trustme.CA()
    issued, files = authority.issue_cert("gateway.test"), [folder / "cert", folder / "key"]
    for file, blob in zip(files, (issued.cert_chain_pems[0], issued.private_key_pem), strict=True):
        blob.write_to_path(str(file))
    app = app_of(engines=["http://127.0.0.1:1"], **settings)
    runner = make_runner(app, tls=Certificate(client_context(), *map(str, files)).context)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield Secure(app, runner.addresses[0][1], authority)
    finally:
        await runner.cleanup()


def run(loop: Loop, test: Callable[[], object]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(test())  # type: ignore[arg-type]


@LOOPS
def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered(loop: Loop, tmp_path: Path) -> None:
    async def test() -> None:
        async with secure(tmp_path) as gateway:
            for _ in range(3):
                assert (await gateway.ask(GET_HEALTH)).startswith(b"HTTP/1.1 200 OK")
            await eventually(lambda: gateway.connections == 0)
            assert not gateway.app[CONNECTIONS].refused

    run(loop, test)


@LOOPS
def test_a_client_that_begins_no_handshake_is_cut_after_the_heads_time(loop: Loop, tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            secure(tmp_path, head_timeout_s=0.3) as gateway,
            asyncio.timeout(DEADLINE_S),
            opened(gateway.port) as (reader, _),
        ):
            await eventually(lambda: gateway.connections == 1)
            assert await reader.read() == b""
            await eventually(lambda: gateway.connections == 0)
            assert gateway.app[CONNECTIONS].refused == {"handshake": 1}

    run(loop, test)


@LOOPS
def test_handshakes_that_stand_still_keep_nobody_out(loop: Loop, tmp_path: Path) -> None:
    async def test() -> None:
        async with secure(tmp_path, max_connections=2) as gateway:
            async with opened(gateway.port) as (first, _), opened(gateway.port):
                await eventually(lambda: gateway.connections == 2)
                assert (await gateway.ask(GET_MODELS)).startswith(b"HTTP/1.1 200")
                assert (await gateway.ask(GET_HEALTH)).startswith(b"HTTP/1.1 200")
                with contextlib.suppress(ConnectionError):
                    assert await first.read() == b""
            await eventually(lambda: gateway.connections == 0)
            assert gateway.app[CONNECTIONS].refused["idle"] >= 1

    run(loop, test)


@LOOPS
def test_a_client_that_speaks_no_tls_is_cut_and_leaves_nothing_behind(loop: Loop, tmp_path: Path) -> None:
    async def test() -> None:
        async with secure(tmp_path) as gateway, asyncio.timeout(DEADLINE_S):
            for junk in (GET_HEALTH, b"\x16\x03\x01" + b"\xff" * 64):
                async with opened(gateway.port) as (reader, writer):
                    writer.write(junk)
                    with contextlib.suppress(ConnectionError):
                        assert b"HTTP" not in await reader.read()
            await eventually(lambda: gateway.connections == 0)
            assert (await gateway.ask(GET_HEALTH)).startswith(b"HTTP/1.1 200")

    run(loop, test)


@LOOPS
def test_the_end_of_the_gateway_ends_handshakes(loop: Loop, tmp_path: Path) -> None:
    async def test() -> None:
        async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as stack:
            async with secure(tmp_path) as gateway:
                reader, _ = await stack.enter_async_context(opened(gateway.port))
                await eventually(lambda: gateway.connections == 1)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""

    run(loop, test)
