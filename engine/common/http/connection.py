"""One HTTP/1.1 client connection with little overhead: it sends bytes and passes the response on.

A connection carries one exchange at a time. The response goes to the exchange's `Sink` as it is read, with the time of
the read. The clock is read once for each read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

Fields = list[tuple[bytes, bytes]]
"""Header fields as they were received."""

MAX_OVERHEAD_BYTES = 2**16
"""Most bytes in a row outside a response's body: its head, its trailers, the 1xx responses before it."""
SMALL_BODY_BYTES = 2**16
LARGE_BODY_BYTES = 2**20
"""A larger request body is written in pieces, so that other requests get their turn in between."""
PIECE_BYTES = 2**18
"""Bytes that one read or write of uvloop takes."""


class Sink(Protocol):
    """Takes one response. All times are seconds on the loop's clock; no method may raise."""

    def head(self, status: int, fields: Fields, now_s: float) -> None:
        """Status and header fields have come."""
        ...

    def body(self, data: bytes, now_s: float) -> None:
        """A piece of the body has come."""
        ...

    def end(self, now_s: float) -> None:
        """The response is complete."""
        ...

    def lost(self, reason: str, now_s: float) -> None:
        """The connection was lost before the response was complete, or the received bytes are not HTTP."""
        ...


class Owner(Protocol):
    """The owner of a connection while it carries no exchange."""

    def opened(self, connection: Connection) -> None:
        """The connection was opened."""
        ...

    @property
    def clock(self) -> Callable[[], float]:
        """Returns seconds on the loop's clock."""
        ...

    def release(self, connection: Connection) -> None:
        """The response is complete, and the connection may carry another request."""
        ...

    def ended_idle(self, connection: Connection) -> None:
        """The server has closed the idle connection."""
        ...

    def gone(self, connection: Connection) -> None:
        """The connection is closed."""
        ...


class Connection(asyncio.Protocol):
    """One connection to a server."""

    __slots__ = (
        *(
            "answered",
            "closed",
            "idle_since_s",
            "is_used",
            "on_body",
            "transport",
            "_bodies",
            "_clock",
            "_fields",
            "_in_body",
            "_is_paused",
            "_now_s",
        ),
        *(
            "_is_sending",
            "_overhead_bytes",
            "_owner",
            "_parser",
            "_sink",
            "_unasked",
            "_until_close",
            "_writable",
            "_writing",
        ),
    )

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._clock = owner.clock
        self._sink: Sink | None = None
        self._now_s = 0.0
        self._fields: Fields = []
        self._bodies: list[bytes] = []
        """Pieces of the body that came with the present read, in order."""
        self.on_body = self._bodies.append
        """Called by the parser once for every chunk: a Python function here would cost more than all the rest."""
        self._overhead_bytes = 0
        self._in_body = False
        self._unasked = False
        self._until_close = False
        self._is_paused = False
        self._is_sending = False
        self._writing: asyncio.Task[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._parser: HttpResponseParser | None = None
        self.transport: asyncio.Transport | None = None
        self.idle_since_s = 0.0
        self.answered = False
        """Whether a byte of the response to the present request has come."""
        self.is_used = False
        self.closed = False

    def request(self, head: bytes, body: bytes, sink: Sink) -> None:
        """Send a whole request. Its response goes to `sink`, then the connection returns to its pool by itself."""
        self._sink = sink
        self.is_used = True
        self.answered = False
        if self.closed or self.transport is None:
            self._lose("the connection was closed")
        elif len(body) <= SMALL_BODY_BYTES:
            self.transport.write(head + body)  # a copy costs less than a second piece
        elif len(body) <= LARGE_BODY_BYTES:
            self.transport.writelines((head, body))
        else:
            self.transport.write(head)
            self._writing = asyncio.get_running_loop().create_task(self._write(memoryview(body)))

    def begin(self, head: bytes, sink: Sink) -> None:
        """Send a request's head, which announces a chunked body; `send` and `finish` send the body."""
        self.request(head, b"", sink)
        self._is_sending = True

    async def send(self, piece: bytes) -> bool:
        """Send a piece of the body, and wait until the socket takes more. Return False if the connection is closed."""
        if piece and not self.closed and self.transport is not None:
            self.transport.writelines((b"%x\r\n" % len(piece), piece, b"\r\n"))
        if self._writable is not None:
            await self._writable
        return not self.closed

    def finish(self) -> None:
        """End the body."""
        self._is_sending = False
        if not self.closed and self.transport is not None:
            self.transport.write(b"0\r\n\r\n")

    @property
    def sink(self) -> Sink | None:
        """The sink of the response in progress; None when idle."""
        return self._sink

    def drop(self, sink: Sink) -> None:
        """Close at once, unless the response to `sink` is complete: then the connection may carry another exchange."""
        if self._sink is sink:
            self.abort()

    def abort(self) -> None:
        """Close at once, with no more calls to the sink."""
        self._sink = None
        self.closed = True
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
        if self.transport is not None:
            self.transport.abort()

    def pause(self, sink: Sink) -> None:
        """Stop reading the response to `sink` for now."""
        if self._sink is sink and not self._is_paused and self.transport is not None:
            self._is_paused = True
            self.transport.pause_reading()

    def resume(self, sink: Sink) -> None:
        """Read the response to `sink` again."""
        if self._sink is sink:
            self._resume()

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._parser = HttpResponseParser(self)
        self._owner.opened(self)

    def data_received(self, data: bytes) -> None:
        if self.closed or self._parser is None:
            return
        self._now_s = self._clock()
        self.answered = True
        if self._sink is None:  # no request: the server announces the end of an idle connection
            self.abort()
            return
        self._overhead_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            self._lose(f"not HTTP: {error}")
        except HttpParserUpgrade:
            self._lose("not HTTP: the server changes to another protocol")
        if self._bodies:
            self._pass_body()
        if self._overhead_bytes > MAX_OVERHEAD_BYTES and self._sink is not None:
            self._lose(f"not HTTP: more than {MAX_OVERHEAD_BYTES} bytes outside of a body")
        if self._unasked and not self.closed:  # a response without a request: the connection cannot be trusted
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        was_closed, self.closed = self.closed, True
        self._parser = None  # breaks the reference cycle
        self._wake_writer()
        if not was_closed:
            self._now_s = self._clock()
            if self._sink is None:
                self._owner.ended_idle(self)
            elif exc is None and self._in_body and self._until_close:
                self._finish()
            else:
                self._lose(f"{type(exc).__name__} {exc}" if exc else "the server closed the connection")
        self._owner.gone(self)
        self.transport = None

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        self._wake_writer()

    # -- callbacks of the parser ---------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._unasked = self._sink is None

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # trailers are ignored
            self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status >= 200 and self._sink is not None:
            fields, self._fields = self._fields, []
            self._in_body = True
            self._until_close = not _tell_length(fields)
            self._sink.head(status, fields, self._now_s)

    def on_message_complete(self) -> None:
        if self._bodies:
            self._pass_body()
        if not self._in_body:  # 1xx: the final response follows
            self._fields = []
        elif self._sink is not None:
            self._finish()

    # ------------------------------------------------------------------------------------------------------------

    async def _write(self, body: memoryview) -> None:
        for start in range(0, len(body), PIECE_BYTES):
            if self.transport is None or self.closed:
                return
            self.transport.write(body[start : start + PIECE_BYTES])
            await (self._writable or asyncio.sleep(0))
        self._writing = None

    def _pass_body(self) -> None:
        """Pass on the body's bytes from the present read as one piece."""
        bodies, self._overhead_bytes = self._bodies, 0
        data = bodies[0] if len(bodies) == 1 else b"".join(bodies)
        bodies.clear()
        if self._sink is not None:
            self._sink.body(data, self._now_s)

    def _wake_writer(self) -> None:
        if self._writable is not None:
            if not self._writable.done():
                self._writable.set_result(None)
            self._writable = None

    def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            if self.transport is not None and not self.closed:
                self.transport.resume_reading()

    def _finish(self) -> None:
        sink, self._sink = self._sink, None
        self._in_body = False
        self._overhead_bytes = 0
        self._resume()
        if sink is not None:
            sink.end(self._now_s)
        if not self.closed and self._parser is not None and self._is_reusable(self._parser):
            self.idle_since_s = self._now_s
            self._owner.release(self)
        else:
            self.abort()

    def _is_reusable(self, parser: HttpResponseParser) -> bool:
        """Whether the server keeps the connection open and has read the whole request: it may have answered early."""
        if not parser.should_keep_alive() or self._writing is not None or self._is_sending or self.transport is None:
            return False
        return not self.transport.is_closing() and not self.transport.get_write_buffer_size()

    def _lose(self, reason: str) -> None:
        if self._bodies:
            self._pass_body()
        sink = self._sink
        if not self.closed:
            self.abort()
        self._sink = None
        if sink is not None:
            sink.lost(reason, self._now_s)


def _tell_length(fields: Fields) -> bool:
    """Return whether a field says where the body ends. Without one it ends with the connection."""
    for name, value in fields:
        size = len(name)  # compared first, because few other names have these lengths
        if size == 14:
            if name.lower() == b"content-length":
                return True
        elif size == 17 and name.lower() == b"transfer-encoding" and value.lower().endswith(b"chunked"):
            return True
    return False
