"""Which bytes of a connection its parser gets: a body's only when a handler wants them.

A client without a key, or a tenant at its limit, is answered by the head alone. What it has sent of a body by then, and
what comes later, is dropped unread. A body in tiny chunks costs the parser a microsecond for each chunk, so the bytes
that are no content are bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from aiohttp import StreamReader

from router.edge.turns import Turns

LITTLE_BYTES = 4096
"""Bytes after a head that the parser gets at once: the whole body of most requests. In chunks of one byte, they take
less than a millisecond."""
KEPT_BYTES = 2**16
"""Bytes of a body that nobody has wanted yet, after which no more are received; or that are read, though nobody wants
them, so that the connection can be used again."""
LEAST_SLICE_BYTES, MOST_SLICE_BYTES = 2**11, 2**16
"""Bytes of a chunked body that the parser gets at a time: few at first, which may be 400 chunks and take a millisecond;
twice as many after a slice of large chunks."""
LARGE_CHUNKS_SHARE = 1 / 8
"""Most bytes that are no content, per byte of a slice of large chunks."""
FREE_FRAMING_BYTES = 2**16
"""Bytes that are no content, for any body: 10,000 chunks of any size. Some clients send a chunk for each value of their
JSON."""
FRAMING_SHARE = 1 / 32
"""Further bytes that are no content, per byte of content: chunks of 200 bytes have as many."""
_HEAD_END = b"\r\n\r\n"
_CHUNKED = b"chunked"
_LAST_CHUNK = b"0\r\n\r\n"


class Parser(Protocol):
    """The parser of a connection, and its socket."""

    @property
    def is_full(self) -> bool:
        """Whether the parser takes no more until its content is read."""
        ...

    def parse(self, data: bytes) -> bool:
        """Parse data. Return whether a request is there, complete or not, whose answer is not sent."""
        ...

    def receive(self, go_on: bool) -> None:
        """Receive more from the socket, or stop."""
        ...


class BodyFlow:
    """The bytes of one connection."""

    def __init__(self, parser: Parser, on_tiny: Callable[[], None], turns: Turns) -> None:
        """`on_tiny` is called once for a body whose chunks are too small. The rest of it must be dropped."""
        self._parser = parser
        self._on_tiny = on_tiny
        self._turns = turns
        self._slice_bytes = LEAST_SLICE_BYTES
        self._has_turn = False
        """Whether the next slice waits for its turn."""
        self._kept = bytearray()
        self._before = b""
        """The last bytes of a head that is not complete."""
        self._has_request = False
        self._body: StreamReader | None = None
        self._missing: int | None = None
        """Bytes of the body that were not parsed yet; None if the body is chunked."""
        self._parsed = 0
        """Bytes of a chunked body that were parsed, less its content before."""
        self._is_wanted = self._is_stopped = False
        self._to_drop: int | None = None
        self._last = b""
        """The last bytes that were dropped."""
        self.is_over = False
        """Whether the end of a body that is dropped has come."""

    @property
    def is_dropping(self) -> bool:
        """Whether the rest of the body is dropped."""
        return self._to_drop is not None

    @property
    def is_unwanted(self) -> bool:
        """Whether bytes that come now are kept, since no handler wants them yet."""
        return self._has_request and not self._is_wanted

    def came(self, data: bytes) -> bool:
        """Take bytes that were received. Return False if there are too many of a body that is dropped."""
        if self._to_drop is not None:
            return self.drop(self._to_drop, data)
        if self._missing is not None and self._has_request and not self._kept and self._takes(len(data)):
            self._missing -= len(data)
            self._parser.parse(data)  # most of a large body: without a copy
        elif self._has_request:
            self._kept += data
            self._go_on()
        else:
            self._head(data)
        return True

    def _takes(self, size: int) -> bool:
        """Whether the parser takes the next `size` bytes as they are: they belong to a body that is not chunked."""
        return self._is_wanted and not self._parser.is_full and size <= (self._missing or 0)

    def _head(self, data: bytes) -> None:
        """Parse a head, and only a little of what follows it."""
        known = len(self._before)
        end = (self._before + data).find(_HEAD_END)
        cut = len(data) if end < 0 else end + len(_HEAD_END) - known
        if _CHUNKED not in data[:cut].lower():
            cut += LITTLE_BYTES
        self._before = (self._before + data)[-len(_HEAD_END) + 1 :] if end < 0 else b""
        self._has_request = self._parser.parse(data[:cut])
        if cut < len(data):
            self.came(data[cut:])

    def began(self, body: StreamReader, length: int | None, is_chunked: bool) -> None:
        """Note the request that is handled now. `length`: its Content-Length."""
        self._has_request = True
        self._body = body
        self._is_wanted = False
        self._slice_bytes = LEAST_SLICE_BYTES
        self._parsed = -body.total_bytes
        self._missing = None if is_chunked else (length or 0) - body.total_bytes

    def want(self) -> None:
        """Let the parser have the body."""
        self._is_wanted = True
        self._go_on()

    def resumed(self) -> None:
        """Go on, because the parser takes more. More is received from the socket."""
        self._is_stopped = False
        self._go_on()

    def _go_on(self) -> None:
        """Parse what is kept of the body, as far as the parser takes it. Receive more if little is left."""
        self._parse_kept()
        self._stop(len(self._kept) > KEPT_BYTES)

    @property
    def _can_parse(self) -> bool:
        """Whether the parser takes more of what is kept."""
        if not self._kept or not self._is_wanted or self._body is None:
            return False
        return not self._body.is_eof() and not self._parser.is_full

    def _parse_kept(self) -> None:
        while self._can_parse and self._missing is not None:
            piece = bytes(self._kept[: max(1, self._missing)])
            del self._kept[: len(piece)]
            self._missing -= len(piece)
            self._parser.parse(piece)
        if self._can_parse and not self._has_turn:
            self._has_turn = True
            self._turns.add(self._parse_slice)

    def _parse_slice(self) -> None:
        """Parse the next slice of a chunked body."""
        self._has_turn = False
        body = self._body
        if not self._can_parse or body is None or self._missing is not None:
            return
        piece = bytes(self._kept[: self._slice_bytes])
        del self._kept[: len(piece)]
        known = body.total_bytes
        self._parser.parse(piece)
        self._parsed += len(piece)
        is_large = len(piece) - (body.total_bytes - known) <= LARGE_CHUNKS_SHARE * len(piece)
        self._slice_bytes = min(MOST_SLICE_BYTES, 2 * self._slice_bytes) if is_large else LEAST_SLICE_BYTES
        framing = self._parsed - body.total_bytes
        if framing > FREE_FRAMING_BYTES + body.total_bytes * FRAMING_SHARE and not self._parser.is_full:
            self._is_wanted = False
            self._on_tiny()
        self._go_on()

    def _stop(self, stops: bool) -> None:
        if stops != self._is_stopped:
            self._is_stopped = stops
            self._parser.receive(not stops)

    def read_little(self) -> None:
        """Parse the rest of a body that nobody wants, if it is short and here, so that the connection can go on."""
        if self._is_wanted or len(self._kept) < (self._missing or 0):
            return
        if self._missing is not None and len(self._kept) <= KEPT_BYTES:
            self.want()
        elif self._missing is None and len(self._kept) <= LEAST_SLICE_BYTES:
            self._is_wanted = True
            self._parse_slice()

    def drop(self, most: int, data: bytes = b"") -> bool:
        """Drop the rest of the body, with what is kept of it. Return False if that is more than `most` bytes."""
        dropped = len(data) + len(self._kept)
        size = len(_LAST_CHUNK)
        self._last = (self._last + self._kept[-size:] + data[-size:])[-size:]
        self._kept.clear()
        self._to_drop = most - dropped
        if self._missing is not None:
            self._missing -= dropped
        self.is_over = self._last == _LAST_CHUNK if self._missing is None else self._missing <= 0
        if self._body is not None and self.is_over and not self._body.is_eof():
            self._body.feed_eof()
        self._stop(False)
        return self._to_drop >= 0

    def ended(self, has_next: bool) -> bytes:
        """Note that the request is answered. `has_next`: the parser has the head of another. Return what has come for a
        request whose head was not parsed."""
        self._has_request, self._is_wanted, self._body = has_next, False, None
        if has_next:
            return b""
        rest = bytes(self._kept)
        self._kept.clear()
        self._stop(False)
        return rest
