"""Reads and writes bodies, each with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from engine.contract.errors import BadRequest, TooManyRequests

BODY_TIMEOUT_S = 60.0
MAX_BODY_BYTES = 64 * 2**20
MAX_BODIES_BYTES = 8 * MAX_BODY_BYTES
"""Most bytes of all bodies that have arrived and are not prepared yet."""
SMALL_BODY_BYTES = 2**18
"""Bytes of each body that do not count in MAX_BODIES_BYTES."""
RETRY_AFTER_S = 1.0
WRITE_TIMEOUT_S = 120.0
"""A client that reads nothing for this long is treated as gone."""
SMALL_BYTES = 16_384
"""Bytes that a socket without a backlog takes at once: far below the 64 KiB at which a transport makes writers wait."""
_SLICE_BYTES = 65_536


class BodyRoom:
    """Bounds the memory of all bodies that arrive or wait for a text thread. The first SMALL_BODY_BYTES of each do not
    count, so that large bodies keep no small one out."""

    def __init__(self, max_bytes: int = MAX_BODIES_BYTES) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0


class _Arriving:
    """The bytes of one body that have arrived, as they count in the room."""

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self.size = self._counted = 0

    def grow(self, chunk: int) -> None:
        """Count a further chunk. Raises TooManyRequests."""
        self.size += chunk
        counted = max(0, self.size - SMALL_BODY_BYTES)
        self._room.bytes += counted - self._counted
        self._counted = counted
        if counted and self._room.bytes > self._room.max_bytes:
            raise TooManyRequests("too many large requests have arrived at once", retry_after_s=RETRY_AFTER_S)

    def leave(self) -> None:
        """Count the body no longer."""
        self._room.bytes -= self._counted
        self._counted = 0


@asynccontextmanager
async def body_of(request: web.Request, room: BodyRoom) -> AsyncIterator[bytes]:
    """Yield the request's whole body, which counts in the room until the block ends.

    Raises BadRequest if it comes late or does not match its headers, and TooManyRequests if there is no room.
    """
    arriving = _Arriving(room)
    try:
        yield await _read(request, arriving)
    finally:
        arriving.leave()


async def _read(request: web.Request, arriving: _Arriving) -> bytes:
    chunks = list[bytes]()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while chunk := await request.content.readany():
                chunks.append(chunk)
                arriving.grow(len(chunk))
                if arriving.size > MAX_BODY_BYTES:
                    raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, arriving.size)
    except TimeoutError:
        raise BadRequest(f"the request body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    except web.RequestPayloadError as error:
        raise BadRequest(f"the request body cannot be read: {error}") from None
    return b"".join(chunks)


async def write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Write data. Raises ConnectionResetError if the client has left or no longer reads."""
    if not data:
        return
    transport = request.transport
    if transport is not None and len(data) <= SMALL_BYTES and not transport.get_write_buffer_size():
        await response.write(data)  # never waits, so it needs no timer, which is a tenth of a token's cost
        return
    async with _deadline():
        await response.write(data)


@asynccontextmanager
async def ending(request: web.Request, response: web.StreamResponse) -> AsyncIterator[None]:
    """End the body when the block ends; any failure in the block drops the connection.

    So the client never takes a part for the whole and never gets a second answer inside the first.
    """
    is_whole = False
    try:
        yield
        async with _deadline():
            await response.write_eof()
        is_whole = True
    finally:
        if not is_whole and request.transport is not None:
            request.transport.abort()


async def send_json(request: web.Request, body: bytes, headers: Mapping[str, str]) -> web.StreamResponse:
    """Send a whole answer of any size, in slices, so that a slow reader is not mistaken for one that reads nothing."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", **headers})
    response.content_length = len(body)
    async with ending(request, response):
        await response.prepare(request)
        for start in range(0, len(body), _SLICE_BYTES):
            await write(request, response, body[start : start + _SLICE_BYTES])
    return response


async def finish(request: web.Request, response: web.StreamResponse) -> None:
    """Send the rest of a response, with a deadline: aiohttp itself waits for ever for a client that reads nothing."""
    with suppress(ConnectionError):  # the client has left
        async with ending(request, response):
            await response.prepare(request)


@asynccontextmanager
async def _deadline() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            yield
    except TimeoutError:
        raise ConnectionResetError(f"the client has read nothing for {WRITE_TIMEOUT_S:g} s") from None
