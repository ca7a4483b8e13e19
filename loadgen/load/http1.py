"""HTTP/1.1 over pooled connections: what a load generator needs of a client, and nothing that costs time.

A connection carries one exchange at a time. What comes back goes to the exchange's `Sink` as it is read, with the time
of the read: one reading of the clock for all that one read brought.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from httptools import HttpParserError, HttpResponseParser

IDLE_S = 4.0
"""Idle connections older than this are closed, not reused: uvicorn, in front of vLLM and SGLang, closes them after 5 s,
and a request that crosses the closing on its way is lost."""

CLOSE_S = 10.0
"""An aborted connection is gone in the event loop's next turn; this bounds the wait should one never be."""


class Sink(Protocol):
    """Takes one response. All times are seconds on the loop's clock; no method may raise."""

    def head(self, status: int, headers: dict[bytes, bytes], now_s: float) -> None:
        """Status and header fields (names in lower case) have come."""
        ...

    def body(self, data: bytes, now_s: float) -> None:
        """A piece of the body has come."""
        ...

    def end(self, now_s: float) -> None:
        """The response is complete."""
        ...

    def lost(self, reason: str, now_s: float) -> None:
        """The connection went before the response was complete, or what came is not HTTP."""
        ...


class Connection(asyncio.Protocol):
    """One connection to the server, owned by its pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._clock = pool.clock
        self._sink: Sink | None = None
        self._now_s = 0.0
        self._headers: dict[bytes, bytes] = {}
        self._in_body = False
        self._unasked = False
        self.idle_since_s = 0.0
        self.answered = False
        """Whether a byte of the response to the present request has come."""
        self.closed = False

    def request(self, data: bytes, sink: Sink) -> None:
        """Send a whole request; what becomes of it goes to `sink`. The connection returns to its pool by itself."""
        self._sink = sink
        self.answered = False
        self._transport.write(data)

    def drop(self, sink: Sink) -> None:
        """Close at once, unless the response to `sink` is complete: then the connection may be another's by now."""
        if self._sink is sink:
            self.abort()

    def abort(self) -> None:
        """Close at once; the sink hears nothing more."""
        self._sink = None
        self.closed = True
        self._transport.abort()

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = HttpResponseParser(self)
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        self._now_s = self._clock()
        self.answered = True
        if self._sink is None:  # nothing was asked: a server that announces the end of an idle connection
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            self._lose(f"not HTTP: {error}")
        if self._unasked:  # more than the response that was asked for: what comes next is anyone's guess
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._pool.gone(self)
        self._now_s = self._clock()
        if self._sink is not None and exc is None and self._until_close():
            self._finish()
        else:
            self._lose(f"{type(exc).__name__} {exc}" if exc else "the server closed the connection")

    # -- callbacks of the parser ---------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._unasked = self._sink is None

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and self._sink is not None:
            self._in_body = True
            self._sink.head(status, self._headers, self._now_s)

    def on_body(self, data: bytes) -> None:
        if self._sink is not None:
            self._sink.body(data, self._now_s)

    def on_message_complete(self) -> None:
        if not self._in_body:  # 1xx: the response itself is still to come
            self._headers = {}
        elif self._sink is not None:
            self._finish()

    # ------------------------------------------------------------------------------------------------------------

    def _until_close(self) -> bool:
        fields = self._headers
        return self._in_body and b"content-length" not in fields and b"transfer-encoding" not in fields

    def _finish(self) -> None:
        sink, self._sink = self._sink, None
        self._headers = {}
        self._in_body = False
        if sink is not None:
            sink.end(self._now_s)
        if not self.closed and self._parser.should_keep_alive():
            self.idle_since_s = self._now_s
            self._pool.release(self)
        else:
            self.abort()

    def _lose(self, reason: str) -> None:
        sink = self._sink
        if not self.closed:
            self.abort()
        self._sink = None
        if sink is not None:
            sink.lost(reason, self._now_s)


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is. `tls` None: plain HTTP."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None


class Pool:
    """Connections to one address, the latest used first: so that few stay warm and the others run out.

    No limit: an open loop must not queue in its own client.
    """

    def __init__(self, address: Address, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._address = address
        self._hosts: list[str] = []
        self._idle: deque[Connection] = deque()
        self._open: set[Connection] = set()
        self._none_open = asyncio.Event()

    def take(self) -> Connection | None:
        """An idle connection, no longer the pool's; None: open one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.closed:
                continue
            if connection.idle_since_s >= self.clock() - IDLE_S:
                return connection
            connection.abort()
        return None

    async def connect(self) -> Connection:
        """A fresh connection. Raises OSError (of which ssl.SSLError is one); deadlines are the caller's."""
        address = self._address
        if not self._hosts:
            found = await asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=1)
            self._hosts = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        refused: OSError | None = None
        for host in list(self._hosts):
            try:
                connection = await self._connect(host)
            except OSError as error:
                refused = error
            else:
                if host != self._hosts[0]:  # localhost is often ::1 first, where nobody listens
                    self._hosts.sort(key=lambda other: other != host)
                return connection
        assert refused is not None
        raise refused

    async def _connect(self, host: str) -> Connection:
        address, connection, is_made = self._address, Connection(self), False
        name = address.host if address.tls else None
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: connection, host, address.port, ssl=address.tls, server_hostname=name
            )
            is_made = True
        finally:
            if not is_made:  # uvloop closes the socket of a cancelled call without a word to a protocol that has it
                self.gone(connection)
        return connection

    def opened(self, connection: Connection) -> None:
        """Told by a connection: it exists."""
        self._open.add(connection)

    def release(self, connection: Connection) -> None:
        """Told by a connection: its response is complete and it may carry another request."""
        idle = self._idle
        idle.append(connection)
        while idle and (idle[0].closed or idle[0].idle_since_s < connection.idle_since_s - IDLE_S):
            if not (oldest := idle.popleft()).closed:
                oldest.abort()

    def gone(self, connection: Connection) -> None:
        """Told by a connection: it is closed."""
        self._open.discard(connection)
        if not self._open:
            self._none_open.set()

    async def close(self) -> None:
        """Close every connection and wait until the event loop has forgotten them."""
        self._idle.clear()
        self._none_open.clear()
        for connection in list(self._open):
            connection.abort()
        if self._open:
            async with asyncio.timeout(CLOSE_S):
                await self._none_open.wait()
