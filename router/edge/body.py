"""Read a request's body whole, within bounds of size, time and memory."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from engine.contract.bounded_json import TooManyValues, ValueCount
from engine.contract.errors import BadRequest
from engine.contract.requests import too_many_values
from router.edge.admission import Admitted
from router.edge.connection_limits import leave_fifo, turns_of, want_body
from router.edge.errors import RequestTimeout, TooLarge
from router.edge.inflate import Inflater, NotCompressed, inflater_for

LONG_BYTES = 2**14
"""A larger piece waits for its turn."""
LONG_JOIN_BYTES = 2**21
"""So many bytes take a millisecond to join."""
WINDOW_S = 5.0
"""Seconds over which the minimum rate is checked: a client may make shorter pauses."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The longest time for a body, in seconds, and its lowest rate, in bytes/s. A rate of 0 is no bound."""

    timeout_s: float
    min_rate: int

    @property
    def window_s(self) -> float:
        """Seconds in which `window_bytes` must come."""
        return WINDOW_S if self.min_rate else math.inf

    @property
    def window_bytes(self) -> float:
        """Bytes that must come in each `window_s`."""
        return self.min_rate * WINDOW_S


async def read_body(request: web.Request, admitted: Admitted, limits: BodyLimits, deadline_s: float) -> bytes:
    """Return the inflated body; its bytes count among those in flight as they come.

    The length in the head reserves nothing: a client that sends no body takes no room. Raises TooLarge,
    UnsupportedEncoding, TooManyRequests, RequestTimeout, and BadRequest for a body that cannot be read.
    """
    encoding = request.headers.get("Content-Encoding")
    inflater = None if encoding is None else inflater_for(encoding)
    _check_size(request.content_length or 0, request)
    want_body(request)
    try:
        is_here = request.content.is_eof()  # true of small bodies: there is nothing to wait for
        if is_here and inflater is None:
            whole = request.content.read_nowait()
            _check_size(len(whole), request)
            admitted.hold(len(whole))
            return whole
        body = _Body(request, admitted, inflater)
        leave_fifo(request)  # what follows waits for turns
        if not is_here:
            await go_ahead(request)
            await _receive(body, limits, deadline_s)
        while piece := await request.content.readany():
            await body.take(piece)
        return await body.whole()
    except TooManyValues as error:
        raise too_many_values(error) from None
    except web.RequestPayloadError as error:
        raise unreadable(error) from None
    except NotCompressed as error:
        raise BadRequest(f"the request's body cannot be read: {error}") from None


async def no_go_ahead(request: web.Request) -> None:
    """Send no `100 Continue` yet: `go_ahead` sends it when the body is wanted. Raises HTTPExpectationFailed."""
    if request.headers.get("Expect", "").lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="the header Expect must be 100-continue")


async def go_ahead(request: web.Request) -> None:
    """Send `100 Continue` to a client that waits for it."""
    if "Expect" in request.headers and request.version >= (1, 1):
        writer = request.writer
        await writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        writer.output_size = 0  # nothing of the answer is sent yet


async def _receive(body: _Body, limits: BodyLimits, deadline_s: float) -> None:
    """Receive the whole body. Each `window_bytes` may take `window_s` seconds. Raises RequestTimeout."""
    clock = asyncio.get_running_loop().time
    deadline_s = min(deadline_s, clock() + limits.timeout_s)
    next_share = limits.window_bytes
    try:
        async with asyncio.timeout_at(min(deadline_s, clock() + limits.window_s)) as limit:
            while piece := await body.content.readany():
                await body.take(piece)
                if body.received >= next_share:
                    next_share = body.received + limits.window_bytes
                    limit.reschedule(min(deadline_s, clock() + limits.window_s))
    except TimeoutError:
        raise too_slow(limits) from None


def unreadable(error: web.RequestPayloadError) -> BadRequest:
    """Return the error of a body that breaks the rules of HTTP, with the parser's reason."""
    cause = error.__cause__ or error
    return BadRequest(f"the request's body cannot be read: {getattr(cause, 'message', cause)}")


def too_slow(limits: BodyLimits) -> RequestTimeout:
    """Return the error of a client that sends its body too slowly."""
    message = f"the request's body did not arrive in time: it has {limits.timeout_s:g} s"
    if limits.min_rate:
        message += f", and in each {limits.window_s:g} s at least {limits.window_bytes:g} bytes must come"
    return RequestTimeout(message)


class _Body:
    """The part of a body that has come so far."""

    def __init__(self, request: web.Request, admitted: Admitted, inflater: Inflater | None) -> None:
        self.content = request.content
        self.received = 0
        """Bytes received, before inflating."""
        self._check: Callable[[int], None] = lambda size: _check_size(size, request)
        self._admitted = admitted
        self._inflater = inflater
        self._chunks: list[bytes] = []
        self._size = 0
        self._values = ValueCount()
        self._turns = turns_of(request)

    async def take(self, piece: bytes) -> None:
        """Add a piece. Other requests get their turn between the slices of a large or compressed piece."""
        self.received += len(piece)
        if self._inflater is None:
            await self._add(piece)
            return
        self._check(self.received)
        for made in self._inflater.inflate(piece):
            await self._add(made)

    async def whole(self) -> bytes:
        """Return the whole body, after its last piece."""
        if self._inflater is not None and self.received:
            for made in self._inflater.finish():
                await self._add(made)
        return await joined(self._chunks)

    async def _add(self, made: bytes) -> None:
        if not made:
            return
        if len(made) > LONG_BYTES:
            await self._turns.turn()
        self._size += len(made)
        self._check(self._size)
        self._admitted.hold(self._size)
        self._chunks.append(made)
        for _ in self._values.add(made):  # the client may send 16 MiB of what is not read
            await self._turns.turn()


async def joined(pieces: Sequence[bytes]) -> bytes:
    """Return the pieces as one. Other requests go on meanwhile if that takes long: Python then copies without its
    lock, https://github.com/python/cpython/blob/3.11/Objects/stringlib/join.h."""
    if sum(map(len, pieces)) < LONG_JOIN_BYTES:
        return b"".join(pieces)
    return await asyncio.to_thread(b"".join, pieces)


def _check_size(size: int, request: web.Request) -> None:
    if size > request.client_max_size:
        raise TooLarge(f"the request body is larger than {request.client_max_size} bytes")
