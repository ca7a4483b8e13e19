"""A server on a real socket with a script for every answer: bytes, pauses, the end of the connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Warmroute-Pod: pod-7\r\nX-Warmroute-Policy: warm\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the client sent it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int
    """Number of the connection, from 0."""

    @property
    def fields(self) -> dict[str, Any]:
        return dict(json.loads(self.body))


Script = Callable[[Request, asyncio.StreamWriter], Awaitable[None]]


@dataclass(slots=True)
class ScriptedServer:
    """Reads requests, answers as scripted, and keeps connections open until the script closes them."""

    script: Script
    port: int = 0
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    """Connections that have not ended."""

    @contextlib.asynccontextmanager
    async def running(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=tls)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        finally:
            server.close()
            async with asyncio.timeout(10):
                while self.open:  # noqa: ASYNC110  # handlers end when their clients are gone
                    await asyncio.sleep(0.005)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.connections, self.open = self.connections, self.connections + 1, self.open + 1
        try:
            while not writer.is_closing():
                request = await _read(reader, number)
                self.requests.append(request)
                await self.script(request, writer)
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            pass
        finally:
            self.open -= 1
            writer.close()


async def _read(reader: asyncio.StreamReader, connection: int) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(method, path, headers, body, connection)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def word(text: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}])


def stop() -> bytes:
    return event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])


def usage(prompt: int, output: int, cached: int | None = None) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    return event(
        choices=[], usage={"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}
    )


DONE = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"


def whole(text: str = "one two ") -> bytes:
    """The body of a complete stream, before chunking."""
    words = [piece + " " for piece in text.split()]
    return b"".join(word(piece) for piece in words) + stop() + usage(9, len(words), 4) + DONE


async def answer_well(request: Request, writer: asyncio.StreamWriter) -> None:
    """Send a model list or a complete stream."""
    if request.path == "/v1/models":
        writer.write(plain(200, b'{"data":[{"id":"scripted"}]}'))
    else:
        writer.write(STREAM_HEAD + chunk(whole()) + LAST)


def plain(status: int, body: bytes = b"", *, more: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d Said\r\n%bContent-Length: %d\r\n\r\n%b" % (status, more, len(body), body)


def saying(*parts: bytes, close: bool = False) -> Script:
    """Return a script that sends the same bytes each time, and may close the connection."""

    async def script(request: Request, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
        if close:
            writer.close()

    return script
