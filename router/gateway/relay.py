"""Copy an answer from an engine to a client: a stream chunk for chunk, unread; any other in pieces once it is whole."""

from __future__ import annotations

import asyncio

from aiohttp import ClientError, StreamReader, web
from aiohttp.abc import AbstractStreamWriter

from engine.contract.errors import ApiError
from engine.contract.sse import sse_event
from router.gateway.usage import Tail

HELD_BYTES = 2**18
"""An event may be this long before its first bytes go out ahead of its last."""
LAST_WORD_S = 1.0
"""How long a client may take to accept the error event that ends a broken stream."""
PIECE_BYTES = 2**16
"""So much of a whole answer the client has to take within the idle timeout."""
REARM_SHARE = 0.25
"""The idle timer is set anew after this share of it, not on every chunk: that is cheaper, and late by no more. It is
set for as much longer, so that the last chunk before the next time still has the whole of it."""

_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")


class UpstreamBroke(Exception):
    """The engine's stream ended wrongly, or went silent, after its first byte. `is_defect`: it is not merely slow."""

    def __init__(self, message: str, *, is_defect: bool = False) -> None:
        super().__init__(message)
        self.is_defect = is_defect


class ClientStalled(Exception):
    """The client took nothing for the idle timeout."""


class EventRelay:
    """One stream. Bytes after the last complete event wait for the rest of theirs.

    A client cannot use half an event, and an engine that dies within one would leave it half before the error event.
    """

    def __init__(
        self, source: StreamReader, sink: AbstractStreamWriter, tail: Tail, *, idle_s: float, deadline_s: float
    ) -> None:
        self._source = source
        self._sink = sink
        self._idle_s = idle_s
        self._deadline_s = deadline_s
        self._tail = tail
        self._held = b""
        self._is_mid_event = False

    async def copy(self, chunk: bytes) -> None:
        """Send `chunk`, all that follows, and the end.

        Raises UpstreamBroke, ClientStalled, or ConnectionError when the client is gone.
        """
        clock = asyncio.get_running_loop().time
        read, write, keep = self._source.readany, self._sink.write, self._tail.add
        rearm_at_s = 0.0
        is_reading = False
        try:
            async with asyncio.timeout(None) as limit:
                while chunk:
                    now_s = clock()
                    if now_s >= rearm_at_s:
                        rearm_at_s = now_s + REARM_SHARE * self._idle_s
                        limit.reschedule(min(rearm_at_s + self._idle_s, self._deadline_s))
                    keep(chunk)
                    if self._held or not chunk.endswith(_EVENT_ENDS):
                        chunk = self._complete(chunk)
                    if chunk:
                        await write(chunk)
                    is_reading = True
                    try:
                        chunk = await read()
                    except (ClientError, OSError) as error:
                        text = f"the engine's stream broke: {error or type(error).__name__}"
                        raise UpstreamBroke(text, is_defect=True) from None
                    is_reading = False
                if self._held:
                    await write(self._held)
                await self._sink.write_eof()
        except TimeoutError:
            if not is_reading:
                raise ClientStalled from None
            late = clock() >= self._deadline_s
            raise UpstreamBroke("the request's deadline passed" if late else "the engine went silent") from None

    def _complete(self, chunk: bytes) -> bytes:
        """What may be sent of the held bytes and `chunk`: up to the end of the last complete event."""
        data = self._held + chunk
        end = max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in _EVENT_ENDS)
        if len(data) - end > HELD_BYTES:
            self._held, self._is_mid_event = b"", True
            return data
        self._held = data[end:]
        if end:
            self._is_mid_event = False
        return data[:end]

    async def end_with(self, error: ApiError) -> None:
        """One more event, with the error. What is held of a broken event is left out.

        Raises ClientStalled or ConnectionError.
        """
        event = sse_event(error.body())
        try:
            async with asyncio.timeout(LAST_WORD_S):
                await self._sink.write(b"\n\n" + event if self._is_mid_event else event)
        except TimeoutError:
            raise ClientStalled from None


async def send_whole(request: web.Request, answer: web.Response, *, idle_s: float, deadline_s: float) -> None:
    """Send `answer`, and wait until nothing of it is left in this process.

    The client has `idle_s` for each piece, and for all of them until `deadline_s`, or `idle_s` where that is longer.
    Raises ClientStalled, or ConnectionError when the client is gone.
    """
    transport, body = request.transport, answer.body
    if transport is None:
        raise ConnectionResetError("the client is gone")
    assert isinstance(body, bytes)
    clock = asyncio.get_running_loop().time
    deadline_s = max(deadline_s, clock() + idle_s)
    transport.set_write_buffer_limits(high=0)  # else the last 64 KiB would count as taken while they wait here
    try:
        async with asyncio.timeout(idle_s) as limit:
            writer = await answer.prepare(request)
            assert writer is not None  # only a HEAD request has none
            for start in range(0, len(body), PIECE_BYTES):
                limit.reschedule(min(clock() + idle_s, deadline_s))
                await writer.write(body[start : start + PIECE_BYTES])
                await writer.drain()
            await writer.write_eof()
            await answer.write_eof()
    except TimeoutError:
        raise ClientStalled from None
    finally:
        if not transport.is_closing():
            transport.set_write_buffer_limits()
