"""A request's body, read whole within its bounds."""

from __future__ import annotations

import asyncio

from aiohttp import web

from engine.contract.errors import BadRequest
from router.gateway.admission import Admitted
from router.gateway.errors import DeadlineExceeded, TooLarge


async def read_body(request: web.Request, admitted: Admitted, deadline_s: float) -> bytes:
    """The body, counted among those in flight: what its head announces before any of it is read, more as it comes.

    Raises TooLarge, TooManyRequests, DeadlineExceeded, and BadRequest for what cannot be read.
    """
    announced = request.content_length or 0
    _check_size(announced, request)
    admitted.hold(announced)
    try:
        if request.content.is_eof():  # here already, as small bodies are: nothing to wait for
            return await _read(request, admitted)
        async with asyncio.timeout_at(deadline_s):
            return await _read(request, admitted)
    except TimeoutError:
        raise DeadlineExceeded("the request's body did not arrive in time") from None
    except web.RequestPayloadError as error:
        # It is not what its headers say: not compressed that way, or cut off.
        cause = error.__cause__ or error
        raise BadRequest(f"the request's body cannot be read: {getattr(cause, 'message', cause)}") from None


async def _read(request: web.Request, admitted: Admitted) -> bytes:
    """As `request.read`, which would keep the bytes for as long as the connection does."""
    chunks, size = [], 0
    while chunk := await request.content.readany():
        chunks.append(chunk)
        size += len(chunk)
        _check_size(size, request)
        admitted.hold(size)  # unannounced ones, and those that were compressed
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _check_size(size: int, request: web.Request) -> None:
    if size > request.client_max_size:
        raise TooLarge(f"the request body is larger than {request.client_max_size} bytes")
