"""A client on a bare socket, which sends only what a test tells it to send."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson

from tests.router.rig.helpers import DEADLINE_S, Gateway


@dataclass(frozen=True)
class RawAnswer:
    """What was received until the end of the connection, or of the first answer."""

    status: int
    head: bytes
    body: bytes

    @property
    def error(self) -> Any:
        return orjson.loads(self.body)["error"]


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> RawAnswer:
        """The next answer that has a Content-Length."""
        async with asyncio.timeout(DEADLINE_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            (length,) = (line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            body = await self.reader.readexactly(int(length.partition(b":")[2]))
        return RawAnswer(int(head.split(b" ", 2)[1]), head, body)

    async def closed(self) -> bytes:
        """Return what is received until the gateway closes the connection."""
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(ConnectionError):
                return await self.reader.read()
        return b""


@contextlib.asynccontextmanager
async def connected(gateway: Gateway, *, receive_bytes: int | None = None) -> AsyncIterator[RawClient]:
    """A connection to the gateway; cut at the end."""
    client = socket.socket()
    if receive_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.setblocking(False)
    host, port = gateway.url.removeprefix("http://").split(":")
    await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=client, limit=2**16)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def head(*lines: bytes, path: bytes = b"/v1/completions") -> bytes:
    """The head of a POST with these headers."""
    return b"\r\n".join((b"POST " + path + b" HTTP/1.1", b"Host: g", *lines, b"", b""))


GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: g\r\n\r\n"
GET_MODELS = b"GET /v1/models HTTP/1.1\r\nHost: g\r\n\r\n"
