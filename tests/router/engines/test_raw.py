"""Engines that send odd bytes over a bare socket: empty streams, invalid chunks, resets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import orjson
import pytest

from router.startup.parts import ENGINES
from tests.router.rig.helpers import ScriptedEngine, answers, drops, event, eventually, running, streams

STREAM = {"model": "m", "prompt": "x" * 600, "stream": True}
WHOLE = {"model": "m", "prompt": "x" * 600}
GOOD = [event("fine"), b"data: [DONE]\n\n"]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
JSON_HEAD = HEAD.replace(b"text/event-stream", b"application/json")
NO_CHUNK = b"zzz\r\nnot a chunk\r\n"

Play = Callable[[asyncio.StreamWriter], Awaitable[None]]


class RawEngine(ScriptedEngine):
    """Answers `/v1/models`, and every other request by letting `play` write what it likes."""

    def __init__(self, pod: str, play: Play) -> None:
        super().__init__(pod, drops)
        self._play = play
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._connections.values():
            writer.transport.abort()
        await asyncio.gather(*self._connections)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        models = orjson.dumps({"data": [{"id": "m"}]})
        about = b"HTTP/1.1 200 OK\r\nx-warmroute-pod: %b\r\nContent-Length: %d\r\n\r\n"
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    writer.write(about % ((self.pod or "").encode(), len(models)) + models)
                    continue
                (length,) = (line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
                await reader.readexactly(int(length.partition(b":")[2]))
                self.open += 1
                try:
                    await self._play(writer)
                finally:
                    self.open -= 1
        writer.close()
        del self._connections[task]


def sends(*packets: bytes, close: bool = False) -> Play:
    """Return a play that sends these packets, and closes the connection if `close`."""

    async def play(writer: asyncio.StreamWriter) -> None:
        for packet in packets:
            writer.write(packet)
            await writer.drain()
            await asyncio.sleep(0.05)
        if close:
            writer.close()

    return play


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


EMPTY = {
    "chunked": sends(HEAD, b"0\r\n\r\n"),
    "length 0": sends(HEAD.replace(b"Transfer-Encoding: chunked", b"Content-Length: 0")),
    "closed": sends(HEAD.replace(b"Transfer-Encoding: chunked", b"Connection: close"), close=True),
}


@pytest.mark.parametrize("play", EMPTY.values(), ids=EMPTY)
async def test_a_stream_without_a_byte_is_no_answer(play: Play) -> None:
    pods = [RawEngine("a", play), ScriptedEngine("b", streams(GOOD))]
    async with running(*pods) as gateway, asyncio.timeout(5):
        replies = [await gateway.post(STREAM) for _ in range(2)]
        await pods[1].stop()
        await gateway.wait_pods(1)
        alone = await gateway.post(STREAM)
        text = (await gateway.get("/metrics")).body.decode()
    assert [(reply.status, reply.pod, reply.body) for reply in replies] == [(200, "b", b"".join(GOOD))] * 2
    assert (alone.status, alone.json["error"]["type"]) == (502, "upstream_error")
    assert 'warmroute_gateway_retries_total{reason="disconnect"}' in text


async def test_a_malformed_chunk_ends_a_stream_at_once() -> None:
    may_go_on = asyncio.Event()

    async def play(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(event("a")))
        await may_go_on.wait()
        writer.write(NO_CHUNK)
        await writer.wait_closed()

    async with (
        running(RawEngine("a", play)) as gateway,
        asyncio.timeout(5),
        gateway.session.post(f"{gateway.url}/v1/completions", json=STREAM) as answer,
    ):
        received = await answer.content.readany()
        may_go_on.set()
        with contextlib.suppress(aiohttp.ClientPayloadError):
            while more := await answer.content.readany():
                received += more
    assert received.startswith(event("a"))
    assert b'"upstream_error"' in received
    assert b"the engine's stream broke" in received


@pytest.mark.parametrize(
    ("head", "fields"),
    [(HEAD, STREAM), (JSON_HEAD + chunk(b'{"half":'), WHOLE)],
    ids=["before the first byte of a stream", "within a whole answer"],
)
async def test_a_malformed_chunk_goes_to_another_pod_at_once(head: bytes, fields: dict[str, Any]) -> None:
    good = streams(GOOD) if fields is STREAM else answers(200, b'{"ok": 1}')
    pods = [RawEngine("a", sends(head, NO_CHUNK)), ScriptedEngine("b", good)]
    async with running(*pods, eject_after=10) as gateway, asyncio.timeout(5):
        replies = [await gateway.post(fields) for _ in range(2)]
    assert [(reply.status, reply.pod) for reply in replies] == [(200, "b")] * 2


async def test_a_connection_serves_many_streams_and_its_end_while_idle_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    writers: list[asyncio.StreamWriter] = []

    async def play(writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(HEAD)
        for data in GOOD:
            writer.write(chunk(data))
            await asyncio.sleep(0.005)
        writer.write(b"0\r\n\r\n")

    async with running(RawEngine("a", play), probe_interval_s=30) as gateway, asyncio.timeout(5):
        for _ in range(4):
            assert (await gateway.post(STREAM)).body == b"".join(GOOD)
        assert len(set(writers)) == 1
        assert gateway.app[ENGINES].connections == 1
        connection: socket.socket = writers[0].get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends by a reset
        writers[0].transport.abort()
        await eventually(lambda: gateway.app[ENGINES].connections == 0)
        gc.collect()
        await asyncio.sleep(0)
    assert "never retrieved" not in caplog.text
