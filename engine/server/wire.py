"""Reads and writes bodies, each with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from engine.contract.errors import BadRequest

BODY_TIMEOUT_S = 60.0
WRITE_TIMEOUT_S = 120.0
"""A client that reads nothing for this long is treated as gone."""
SMALL_BYTES = 16_384
"""Bytes that a socket without a backlog takes at once: far below the 64 KiB at which a transport makes writers wait."""
_SLICE_BYTES = 65_536


async def read_body(request: web.Request) -> bytes:
    """Return the request's whole body. Raises BadRequest if it comes late or does not match its headers."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise BadRequest(f"the request body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    except web.RequestPayloadError as error:
        raise BadRequest(f"the request body cannot be read: {error}") from None


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
