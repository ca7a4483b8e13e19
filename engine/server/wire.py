"""Bodies in and out of a connection, each under a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from engine.contract.errors import BadRequest

BODY_TIMEOUT_S = 60.0
WRITE_TIMEOUT_S = 120.0
"""A client that reads nothing for so long is gone."""
SMALL_BYTES = 16_384
"""What a socket without a backlog takes at once: far below the 64 KiB at which a transport makes its writer wait."""
_SLICE_BYTES = 65_536


async def read_body(request: web.Request) -> bytes:
    """The request's whole body. Raises BadRequest where it comes late or is not what its headers say."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise BadRequest(f"the request body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    except web.RequestPayloadError as error:
        raise BadRequest(f"the request body cannot be read: {error}") from None


async def write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Raises ConnectionResetError when the client has gone, or reads nothing any more."""
    if not data:
        return
    transport = request.transport
    if transport is not None and len(data) <= SMALL_BYTES and not transport.get_write_buffer_size():
        await response.write(data)  # never waits, so it needs no timer: a tenth of what a token costs
        return
    async with _deadline():
        await response.write(data)


@asynccontextmanager
async def ending(request: web.Request, response: web.StreamResponse) -> AsyncIterator[None]:
    """The body is written inside and ends with the block; whatever goes wrong drops the connection.

    So the client never takes a part for the whole, nor gets a second answer inside the first.
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
    """A whole answer, however large: in slices, so that a client that reads slowly is not one that reads nothing."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", **headers})
    response.content_length = len(body)
    async with ending(request, response):
        await response.prepare(request)
        for start in range(0, len(body), _SLICE_BYTES):
            await write(request, response, body[start : start + _SLICE_BYTES])
    return response


async def finish(request: web.Request, response: web.StreamResponse) -> None:
    """Send what has not been sent of a response: aiohttp itself waits for ever for a client that reads nothing."""
    with suppress(ConnectionError):  # the client has gone: nobody to answer
        async with ending(request, response):
            await response.prepare(request)


@asynccontextmanager
async def _deadline() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            yield
    except TimeoutError:
        raise ConnectionResetError(f"the client has read nothing for {WRITE_TIMEOUT_S:g} s") from None
