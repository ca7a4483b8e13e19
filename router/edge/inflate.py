"""Inflate compressed bodies slice by slice: no slice blocks the loop, and the caller counts each before the next."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from router.edge.errors import UnsupportedEncoding

INPUT_SLICE_BYTES = 2**16
OUTPUT_SLICE_BYTES = 2**18
"""About a millisecond of inflating."""
MAX_MEMBERS = 64
"""Most members of one gzip body: each costs a new inflater and a copy of the data after it."""

_GZIP = 16 + zlib.MAX_WBITS
_ZLIB = zlib.MAX_WBITS
_RAW = -zlib.MAX_WBITS
_ZLIB_METHOD = 8
"""The lower half of a zlib stream's first byte (RFC 1950). Some clients send `deflate` without zlib's header."""


class NotCompressed(Exception):
    """The body is not compressed as its headers say, or was cut off."""


class Inflater:
    """Inflates one body. Call `inflate` for each piece as it comes, then `finish`."""

    def __init__(self, encoding: str) -> None:
        """`encoding`: `gzip` or `deflate`."""
        self._encoding = encoding
        self._members = 0
        self._now: zlib._Decompress | None = None

    def inflate(self, piece: bytes) -> Iterator[bytes]:
        """Yield the output of `piece` in slices of at most OUTPUT_SLICE_BYTES; some are empty. Raises NotCompressed."""
        for start in range(0, len(piece), INPUT_SLICE_BYTES):
            yield from self._slices(piece[start : start + INPUT_SLICE_BYTES])

    def _slices(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._now is None or self._now.eof:
                self._now = self._member(data)
            try:
                made = self._now.decompress(data, OUTPUT_SLICE_BYTES)
            except zlib.error as error:
                raise NotCompressed(str(error)) from None
            data = self._now.unconsumed_tail or self._now.unused_data
            yield made

    def _member(self, data: bytes) -> zlib._Decompress:
        self._members += 1
        if self._members > MAX_MEMBERS:
            raise NotCompressed(f"it has more than {MAX_MEMBERS} members")
        if self._encoding == "gzip":
            return zlib.decompressobj(_GZIP)
        if self._members > 1:
            raise NotCompressed("something follows its end")
        return zlib.decompressobj(_ZLIB if data[0] & 0xF == _ZLIB_METHOD else _RAW)

    def finish(self) -> Iterator[bytes]:
        """Yield the rest of the output after the last piece. Raises NotCompressed if the end is missing."""
        while self._now is not None and not self._now.eof:
            made = self._now.decompress(b"", OUTPUT_SLICE_BYTES)
            if not made:
                break
            yield made
        if self._now is None or not self._now.eof:
            raise NotCompressed("its end is missing")


def inflater_for(encoding: str | None) -> Inflater | None:
    """Return an inflater for a Content-Encoding; None if there is nothing to inflate. Raises UnsupportedEncoding."""
    name = (encoding or "identity").strip().lower()
    if name == "identity":
        return None
    name = name.removeprefix("x-")
    if name not in ("gzip", "deflate"):
        raise UnsupportedEncoding("Content-Encoding must be gzip, deflate or identity", param="Content-Encoding")
    return Inflater(name)
