"""Read a form that a client uploads (`multipart/form-data`) part by part, and write it anew for an engine.

The new form has the gateway's own boundary, so an engine reads exactly what the gateway read: otherwise one parser
might find a field `model` that the other misses. That field is moved to the front, with the engine's name for the
model.
"""

from __future__ import annotations

import asyncio
import os
import re
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from aiohttp import BadContentDispositionHeader, BadContentDispositionParam, BodyPartReader, MultipartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from engine.contract.errors import BadRequest, quoted
from router.edge import body
from router.edge.body import BodyLimits
from router.edge.connection_limits import leave_fifo
from router.edge.errors import TooLarge, fault_of

T = TypeVar("T")
_WARNINGS = (BadContentDispositionHeader, BadContentDispositionParam)
# Python would show each new warning text and remember it for ever. A part without a name is refused in any case.
for _kind in _WARNINGS:
    warnings.filterwarnings("ignore", category=_kind)

PIECE_BYTES = 2**16
"""Most bytes of a file that are read and sent in one step."""
MAX_NAME_BYTES = 1024
"""Longest name of a model."""
MAX_PARTS = 256
_FIELD = re.compile(r"[\w.\-\[\]$ ]{1,200}", re.ASCII)
"""Field names that every parser reads in the same way."""
_UNSAFE = re.compile(r'[\x00-\x1f\x7f"\\]')
_TYPE = re.compile(r"[!#-~][ -~]{0,199}")


class Pace:
    """The deadlines of a body that is read on demand: only the time spent waiting for the client counts."""

    def __init__(self, limits: BodyLimits, deadline_s: float, received: Callable[[], int]) -> None:
        """`deadline_s`: on the loop's clock. `received` returns the bytes that have come."""
        self._limits = limits
        self._deadline_s = deadline_s
        self._received = received
        self._waited_s = self._waited_in_window_s = 0.0
        self._next_share = limits.window_bytes
        self._clock = asyncio.get_running_loop().time

    async def wait(self, step: Awaitable[T]) -> T:
        """Return the result of `step`. Each `window_bytes` may take `window_s` seconds.

        Raises RequestTimeout.
        """
        began_s = self._clock()
        left_s = min(self._limits.timeout_s - self._waited_s, self._limits.window_s - self._waited_in_window_s)
        try:
            async with asyncio.timeout_at(min(began_s + left_s, self._deadline_s)):
                return await step
        except TimeoutError:
            raise body.too_slow(self._limits) from None
        finally:
            passed_s = self._clock() - began_s
            self._waited_s += passed_s
            self._waited_in_window_s += passed_s
            if self._received() >= self._next_share:
                self._next_share = self._received() + self._limits.window_bytes
                self._waited_in_window_s = 0.0


class Form:
    """One form. See `upload.Parts`."""

    def __init__(self, request: web.Request, limits: BodyLimits, deadline_s: float, max_bytes: int) -> None:
        """`deadline_s`: on the loop's clock. `max_bytes`: largest size. Raises BadRequest if the body is no form."""
        if request.content_type != "multipart/form-data":
            raise BadRequest(
                f"the request body must be a form with a file, not {quoted(request.content_type)}", param="Content-Type"
            )
        try:
            self._reader = MultipartReader(request.headers, request.content)
        except ValueError as error:
            raise _broken(str(error)) from None
        self._request = request
        self._content = request.content
        self._max_bytes = max_bytes
        self._pace = Pace(limits, deadline_s, lambda: self._content.total_bytes)
        self._boundary = f"warmroute-{os.urandom(16).hex()}".encode()
        self.content_type = b"multipart/form-data; boundary=" + self._boundary
        self.model: str | None = None
        self.sample = b""
        self.check: Callable[[str], None] | None = None

    def model_part(self, name: str) -> bytes:
        """Return the field `model` as a part of the new form."""
        return b'--%b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n' % (self._boundary, name.encode())

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield all but the field `model`, as it comes. Raises ApiError, and what `check` raises."""
        parts = 0
        while (part := await self._wait(self._reader.next())) is not None:
            parts += 1
            if parts > MAX_PARTS or not isinstance(part, BodyPartReader):
                raise BadRequest(f"a form must have at most {MAX_PARTS} fields, and no field may contain others")
            if _named(part) == "model":
                self._take_model(await self._name(part))
                continue
            yield self._head(part)
            is_file = part.filename is not None
            async for chunk in self._value(part):
                if is_file and not self.sample:
                    self.sample = chunk
                yield chunk
            yield b"\r\n"
        yield b"--%b--\r\n" % self._boundary

    def _take_model(self, name: str) -> None:
        if self.model is not None:
            raise BadRequest("model is in the form twice: leave one of them out", param="model")
        if self.check is not None:
            self.check(name)
        self.model = name

    async def _name(self, part: BodyPartReader) -> str:
        value = b""
        async for chunk in self._value(part):
            value += chunk
            if len(value) > MAX_NAME_BYTES:
                raise BadRequest(f"model must be a name of at most {MAX_NAME_BYTES} bytes", param="model")
        try:
            name = value.decode()
        except UnicodeDecodeError:
            raise BadRequest("model must be a name in UTF-8", param="model") from None
        if "\r" in name or "\n" in name:
            raise BadRequest("model must be a name without a line break", param="model")
        return name

    async def _value(self, part: BodyPartReader) -> AsyncGenerator[bytes, None]:
        while not part.at_eof():  # the reader raises an error here if the part is cut off
            if chunk := await self._wait(part.read_chunk(PIECE_BYTES)):
                yield chunk

    def _head(self, part: BodyPartReader) -> bytes:
        name, filename, kind = _named(part), part.filename, part.headers.get("Content-Type")
        if name is None or _FIELD.fullmatch(name) is None:
            raise _nameless()
        lines = f'Content-Disposition: form-data; name="{name}"'
        if filename is not None:
            lines += f'; filename="{_UNSAFE.sub("_", filename)}"'
        if kind is not None and _TYPE.fullmatch(kind):
            lines += f"\r\nContent-Type: {kind}"
        return b"--%b\r\n%b\r\n\r\n" % (self._boundary, lines.encode(errors="replace"))

    async def _wait(self, step: Awaitable[T]) -> T:
        """Return the result of a step of the reader, whose errors are the client's faults."""
        try:
            found = await self._pace.wait(step)
        except web.RequestPayloadError as error:
            raise body.unreadable(error) from None
        except HttpProcessingError as error:
            raise _broken(fault_of(error)) from None
        except (ValueError, RuntimeError, AssertionError, *_WARNINGS) as error:
            raise _broken(str(error)) from None
        leave_fifo(self._request)  # the connection may have taken a place when the body's end came
        if self._content.total_bytes > self._max_bytes:
            raise too_large(self._max_bytes)
        return found


def too_large(max_bytes: int) -> TooLarge:
    """Return the error of a form that is too large."""
    return TooLarge(
        f"the form is larger than {max_bytes} bytes: send a shorter or a compressed recording", param="file"
    )


def _named(part: BodyPartReader) -> str | None:
    """Return the field's name; None if it has none that can be read."""
    try:
        return part.name
    except _WARNINGS:  # in case warnings are errors
        return None


def _nameless() -> BadRequest:
    return BadRequest('a part of the form has no valid field name: it needs Content-Disposition: form-data; name="..."')


def _broken(why: str) -> BadRequest:
    return BadRequest(f"the request body is not a valid form (multipart/form-data): {why}")
