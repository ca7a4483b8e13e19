"""A minimal engine: a process that answers every chat request with a fixed stream of events.

    python -m tests.bench.gateway.mock_engine CHUNKS GAP_S

It prints its port. Each answer is CHUNKS events of one word, GAP_S apart (0: all at once), then usage and [DONE].
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, cast

import uvloop

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nx-warmroute-pod: pod-0\r\n"
    b"x-warmroute-policy: round_robin\r\ntransfer-encoding: chunked\r\n\r\n"
)
MODELS = b'{"data":[{"id":"mock"}]}'


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(choices: list[dict[str, Any]], **more: Any) -> bytes:
    body = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 1, "model": "mock", "choices": choices}
    return _chunk(b"data: " + json.dumps({**body, **more}).encode() + b"\n\n")


class Answer(asyncio.Protocol):
    """One connection."""

    def __init__(self, chunks: int, gap_s: float) -> None:
        word = _event([{"index": 0, "delta": {"content": " word"}, "finish_reason": None}])
        usage = {"prompt_tokens": 2000, "completion_tokens": chunks, "prompt_tokens_details": {"cached_tokens": 1500}}
        end = _event([{"index": 0, "delta": {}, "finish_reason": "length"}]) + _event([], usage=usage)
        self.words = [HEAD + word, *[word] * (chunks - 1), end + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"]
        self.gap_s = gap_s
        self.buffer = b""
        self.missing = 0
        self.is_chunked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.is_chunked:
            self.buffer = self.buffer[-8:] + data
            self._look_for_end()
            return
        if self.missing == 0:
            head, mark, body = (self.buffer + data).partition(b"\r\n\r\n")
            if not mark:
                self.buffer = head
                return
            self.buffer = b""
            if head.startswith(b"GET"):
                self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(MODELS), MODELS))
                return
            if b"\ntransfer-encoding: chunked" in head.lower():
                self.buffer, self.is_chunked = body, True
                self._look_for_end()
                return
            length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            self.missing = int(length) - len(body)
        else:
            self.missing -= len(data)
        if self.missing == 0:
            self.answer(0)

    def _look_for_end(self) -> None:
        if self.buffer.endswith(b"0\r\n\r\n"):
            self.buffer, self.is_chunked = b"", False
            self.answer(0)

    def answer(self, number: int) -> None:
        if self.gap_s == 0:
            self.transport.write(b"".join(self.words))
        elif not self.transport.is_closing():
            self.transport.write(self.words[number])
            if number + 1 < len(self.words):
                asyncio.get_running_loop().call_later(self.gap_s, self.answer, number + 1)


async def _serve(chunks: int, gap_s: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Answer(chunks, gap_s), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


@contextlib.contextmanager
def mock_engine(chunks: int, gap_s: float, core: int | None = None) -> Iterator[str]:
    """Yield the URL of a mock engine in its own process, on one core if possible."""
    command = [sys.executable, "-m", "tests.bench.gateway.mock_engine", str(chunks), str(gap_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            if core is not None:
                pin(core, process.pid)
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def pin(core: int, process_id: int = 0) -> None:
    """Keep a process (0: this one) on one core, if the system supports it."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(process_id, {cores[core % len(cores)]})


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), float(sys.argv[2])))
