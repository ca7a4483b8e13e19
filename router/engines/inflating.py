"""Inflate an answer that an engine, or a sidecar before it, has compressed although it was asked not to."""

from __future__ import annotations

import zlib
from typing import Protocol

from router.engines.engine_client import BrokeOff

PIECE_BYTES = 2**16
"""Most bytes that are inflated at once: a small body may hold gigabytes."""
_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": zlib.MAX_WBITS}
"""The `wbits` of zlib for each content coding of RFC 9110, section 8.4.1, that can be inflated here."""


class Body(Protocol):
    """The body of an answer, as it comes."""

    @property
    def is_read(self) -> bool:
        """Whether the body has ended and all of it has been read."""
        ...

    async def readany(self) -> bytes:
        """Return what has come, at least a byte; empty at the end. Raises OSError if the body breaks off."""
        ...


class UnknownCoding(Exception):
    """The body has a content coding that cannot be undone here."""


class Inflater:
    """Undoes one content coding, piece by piece."""

    def __init__(self, coding: str) -> None:
        """Raises UnknownCoding."""
        name = coding.strip().lower()
        if name not in _WINDOWS:
            raise UnknownCoding(f"Content-Encoding {name[:40]!r}, which the gateway cannot undo")
        self._is_raw_possible = name == "deflate"  # some servers leave out the header of zlib
        self._zlib = zlib.decompressobj(_WINDOWS[name])

    @property
    def is_over(self) -> bool:
        """Whether the end of the compressed data was seen."""
        return self._zlib.eof

    @property
    def has_more(self) -> bool:
        """Whether `feed` returns more without more input."""
        return bool(self._zlib.unconsumed_tail)

    def feed(self, data: bytes = b"") -> bytes:
        """Return at most PIECE_BYTES of what `data`, and the rest of earlier data, inflate to. Raises BrokeOff."""
        data = self._zlib.unconsumed_tail + data
        try:
            inflated = self._zlib.decompress(data, PIECE_BYTES)
        except zlib.error as error:
            if not self._is_raw_possible:
                raise BrokeOff(f"its compressed body is damaged: {error}") from None
            self._zlib = zlib.decompressobj(-zlib.MAX_WBITS)
            self._is_raw_possible = False
            return self.feed(data)
        self._is_raw_possible = False
        return inflated


class InflatedBody:
    """A compressed body as its content."""

    def __init__(self, body: Body, coding: str) -> None:
        """Raises UnknownCoding."""
        self._body = body
        self._inflater = Inflater(coding)

    @property
    def is_read(self) -> bool:
        """See Body."""
        return self._body.is_read and not self._inflater.has_more

    async def readany(self) -> bytes:
        """See Body."""
        while True:
            if self._inflater.has_more and (piece := self._inflater.feed()):
                return piece
            chunk = await self._body.readany()
            if not chunk:
                if not self._inflater.is_over:
                    raise BrokeOff("its compressed body ends too early")
                return b""
            if piece := self._inflater.feed(chunk):
                return piece


def inflated(body: Body, coding: str | None) -> Body:
    """Return `body` without its content coding. Raises UnknownCoding."""
    if coding is None or coding.strip().lower() in ("", "identity"):
        return body
    return InflatedBody(body, coding)
