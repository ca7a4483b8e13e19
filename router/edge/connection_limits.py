"""Bound clients' connections, below the requests: how many are open, and how long each may keep the gateway waiting.

aiohttp hands a request over once its head is complete, and counts an answer as sent once it is in the socket's buffer.
This module bounds what happens before and after. It overrides methods of aiohttp's protocol that aiohttp documents or
that asyncio calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import ssl
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import HttpProcessingError

from engine.contract.errors import ApiError, BadRequest, Unavailable
from router.edge.body_flow import BodyFlow
from router.edge.client_keys import OPEN_PATHS
from router.edge.errors import RETRY_AFTER_S, RequestTimeout, error_response, fault_of
from router.edge.fifo import Fifo
from router.edge.handshake import Handshake
from router.edge.turns import Turns
from router.fleet.lack import Lacks

log = logging.getLogger(__name__)

EXTRA = 64
"""Connections beyond the bound that get an answer: a 503, except at OPEN_PATHS. Any more are closed at once."""
SPARE_DESCRIPTORS = 16
"""The last free descriptors: once only these are left, new clients are refused."""
OWN_DESCRIPTORS = 128
"""Descriptors kept for other uses than clients' connections and those to engines on their behalf."""
EXTRA_HEAD_S = 1.0
LINGER_S = 5.0
"""Seconds for which a refused body is read and dropped, so that the client gets to see the answer."""
LEAST_DROPPED_BYTES = 2**20
"""At least this many bytes of a refused body are dropped, however low the bound on bodies is. A client may send that
many before it sees the answer."""
DROPPED_BYTES_PER_S = 2**26
"""Bytes of refused bodies that are received in a second, from all clients: that takes a few percent of a core."""
MOST_DIGITS = 9
"""Of a Content-Length: a body of a gigabyte is not awaited to be dropped."""
CLOSING_S = 5.0
"""Seconds in which the client may take the rest of its last answer before the connection is cut."""
LONGEST_LOOK_S = 0.5
"""Longest time between two looks for late connections."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds for clients' connections. Times are in seconds."""

    max_connections: int
    head_s: float
    """From the first byte of a request to the end of its head."""
    idle_s: float
    """Longest time without a request."""
    write_s: float
    """Longest time to send an answer that the gateway makes itself."""
    descriptors: int
    """File descriptors that the process may have open."""
    dropped_bytes: int
    """Most bytes of a refused body that are read and dropped."""


class Counted(Protocol):
    """A connection, as ClientConnections sees it."""

    why_extra: str
    """Why only OPEN_PATHS are served here; empty if every path is."""

    def end(self) -> None:
        """Cut the connection."""

    def cut_if_late(self, now_s: float) -> str | None:
        """Cut the connection if it is late. Return why; None if it was not cut."""


class ClientConnections:
    """The connections that are open."""

    def __init__(self, limits: ConnectionLimits, lacks: Lacks) -> None:
        self.limits = limits
        self.open: set[Counted] = set()
        self._idle: OrderedDict[Counted, None] = OrderedDict()
        """The connections without a request, the one that has been so for the longest time first."""
        self.fifo = Fifo()
        self.turns = Turns()
        self._drops_until_s = 0.0
        self.refused: Counter[str] = Counter()
        """Connections that were cut or refused, by reason."""
        self._lacks = lacks

    def admit(self, connection: Counted, descriptor: int) -> bool:
        """Count a new connection. Return False if there are too many and the caller must close it.

        At the bound, the connection that has been without a request for the longest time makes room, so clients that
        send nothing, or a head that does not end, keep nobody out. While all have requests, EXTRA more are let in.

        A new descriptor is the lowest free number, so a high number shows that all below it are taken. A shortage must
        be noticed early: at the last descriptor, the event loop would silently close new connections.
        """
        if descriptor >= self.limits.descriptors - SPARE_DESCRIPTORS:
            self._lacks.note("EMFILE")
        limit = self.limits.max_connections
        if len(self.open) >= limit and self._idle:
            self.refused["idle"] += 1
            idlest = next(iter(self._idle))
            self.left(idlest)
            idlest.end()
        count = len(self.open)
        if count >= limit + EXTRA:
            self.refused["connections"] += 1
            return False
        connection.why_extra = "short" if self._lacks.is_short else "connections" if count >= limit else ""
        self.open.add(connection)
        self._idle[connection] = None
        return True

    def left(self, connection: Counted) -> None:
        """Count a connection no more."""
        self.open.discard(connection)
        self._idle.pop(connection, None)

    def is_idle(self, connection: Counted, is_idle: bool) -> None:
        """Note that a request begins on a connection, or has ended."""
        self._idle.pop(connection, None)
        if is_idle and connection in self.open:
            self._idle[connection] = None

    def dropped(self, size: int) -> float:
        """Count bytes of a refused body. Return the seconds until its connection may receive more."""
        now_s = asyncio.get_running_loop().time()
        self._drops_until_s = max(self._drops_until_s, now_s) + size / DROPPED_BYTES_PER_S
        return self._drops_until_s - now_s

    def head_s(self, connection: Counted) -> float:
        """Return the seconds that the connection's next step, the handshake or a request's head, may take."""
        return min(self.limits.head_s, EXTRA_HEAD_S) if connection.why_extra else self.limits.head_s

    async def watch(self) -> None:
        """Cut late connections, until cancelled."""
        clock = asyncio.get_running_loop().time
        pause_s = min(LONGEST_LOOK_S, self.limits.head_s / 4)
        while True:
            await asyncio.sleep(pause_s)
            now_s = clock()
            for connection in list(self.open):
                if (why := connection.cut_if_late(now_s)) is not None:
                    self.refused[why] += 1


class Connection(web.RequestHandler):
    """One connection of a client."""

    __slots__ = (
        "_body",
        "_clients",
        "_closing_since_s",
        "_dropped",
        "_flow",
        "_head_since_s",
        "_held",
        "_is_busy",
        "_skipping",
        "_socket",
        "why_extra",
    )

    def __init__(self, server: LimitedServer, connections: ClientConnections, **options: Any) -> None:
        super().__init__(server, **options)
        self._clients = connections
        self._socket: asyncio.Transport | None = None
        self._head_since_s: float | None = None
        self._closing_since_s: float | None = None
        self._is_busy = False
        self._flow = BodyFlow(self, self._refuse_tiny, connections.turns)
        self._body: StreamReader | None = None
        self._dropped: asyncio.Event | None = None
        """Set when all of a body is dropped that aiohttp no longer waits for."""
        self._held: list[bytes] = []
        """Data that came while the connection waits for a place in the fifo."""
        self._skipping = 0
        """Bytes of a request that was turned away, which are still to come."""
        self.why_extra = ""
        """See Counted."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        socket = cast(asyncio.Transport, transport)
        if not self._clients.admit(self, socket.get_extra_info("socket").fileno()):
            socket.abort()
            return
        self._socket = socket
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """See asyncio.Protocol."""
        self._clients.left(self)
        self._held = []
        self.leave_fifo()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol. aiohttp calls this without data, to go on with the data that it has."""
        if self._socket is None:
            return
        if self._skipping and data:
            skipped = min(len(data), self._skipping)
            self._skip(self._skipping - skipped)
            self._pause_s(self._clients.dropped(skipped))
            if not (data := data[skipped:]):
                return
        if not data:
            super().data_received(data)
        elif self._flow.is_dropping or (self._flow.is_unwanted and not self._held):
            if not self._flow.came(data):
                self._clients.refused["body"] += 1
                self.end()
            elif self._flow.is_over:
                if self._dropped is not None:
                    self._dropped.set()
            elif self._flow.is_dropping:
                self._pause_s(self._clients.dropped(len(data)))
        elif self._held or not self._clients.fifo.enter(self, len(data)):
            if self._held:  # not earlier: a paused connection does not report its end
                self._socket.pause_reading()
            self._held.append(data)
        else:
            self._read(data)

    @property
    def turns(self) -> Turns:
        """For long work on this connection's requests."""
        return self._clients.turns

    def turn_away(self) -> bool:
        """See Waiter. A new POST is refused unread. The connection goes on after its body, if that has a length."""
        data = b"".join(self._held)
        if self._socket is None or self._is_busy or self._head_since_s is not None or not data.startswith(b"POST "):
            return False
        self._held = []
        self._clients.refused["busy"] += 1
        self._socket.resume_reading()
        missing = _missing(data)
        if missing is None:
            self._socket.write(_BUSY_LAST)
            self.force_close()
        else:
            self._socket.write(_BUSY)
            self._skip(missing)
        return True

    def _skip(self, size: int) -> None:
        """Drop so many further bytes. They have the deadline of a head."""
        self._skipping = size
        self._head_since_s = self._loop.time() if size else None

    def take_turn(self) -> None:
        """See Waiter."""
        data, self._held = b"".join(self._held), []
        if self._socket is None or self._socket.is_closing():
            self.leave_fifo()
            return
        self._socket.resume_reading()
        self._read(data)

    def _read(self, data: bytes) -> None:
        """Read data. The connection keeps its place in the fifo only if the data completes a head or a body: otherwise
        this process has no work to do."""
        if self._is_busy:
            missing = self._body is not None and not self._body.is_eof()
            self._flow.came(data)
            keeps = missing and self._body is not None and self._body.is_eof()
        else:
            if self._head_since_s is None and data not in _NO_HEAD:
                self._head_since_s = self._loop.time()
            self._flow.came(data)
            keeps = bool(self._messages)
        if not keeps:
            self.leave_fifo()

    # -- see body_flow.Parser --

    @property
    def is_full(self) -> bool:
        """Whether the parser takes no more until its content is read."""
        return self._reading_paused

    def parse(self, data: bytes) -> bool:
        """Parse data. Return whether a request is there whose answer is not sent."""
        super().data_received(data)
        return self._is_busy or bool(self._messages)

    def receive(self, go_on: bool) -> None:
        """Receive more from the socket, or stop."""
        if self._socket is None or self._socket.is_closing():
            return
        if go_on:
            self._socket.resume_reading()
        else:
            self._socket.pause_reading()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """See aiohttp's BaseProtocol: the content was read, so the parser takes more."""
        super().resume_reading(resume_parser)
        self._flow.resumed()

    def _pause_s(self, pause_s: float) -> None:
        """Receive nothing for some seconds."""
        self.receive(False)
        self._loop.call_later(pause_s, self.receive, True)

    def want_body(self) -> None:
        """Read the body of the request. Until then, no more of it is read than came with its head."""
        self._flow.want()

    def leave_fifo(self) -> None:
        """Give back the place in the fifo, so that the next request is read."""
        self._clients.fifo.leave(self)

    def request_began(self, body: StreamReader, length: int | None, is_chunked: bool) -> None:
        """Note the request that is handled from now on. `length`: of its body, if it is not chunked."""
        self._flow.began(body, length, is_chunked)
        self._head_since_s = None
        self._is_busy = True
        self._body = body
        self._clients.is_idle(self, False)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Finish the response as aiohttp does, within a deadline. The proxy's answers have a deadline of their own."""
        self._flow.read_little()
        is_broken = self._dropped is not None
        if is_broken or not request.content.is_eof():
            if resp is not None:
                resp.force_close()  # what comes after the body would be dropped too
            if not self._flow.drop(self._clients.limits.dropped_bytes):
                self._clients.refused["body"] += 1
                self.end()
        try:
            if resp is not None and resp.prepared:
                return await super().finish_response(request, resp, start_time)
            async with asyncio.timeout(self._clients.limits.write_s):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            self._clients.refused["write"] += 1
            self.end()
            return resp, True
        finally:
            if is_broken:
                await self._drop_rest()
            self._is_busy = False
            self._body = None
            self._clients.is_idle(self, True)
            self.leave_fifo()
            if rest := self._flow.ended(bool(self._messages)):
                self.data_received(rest)

    def _refuse_tiny(self) -> None:
        """Let the handler that reads the body refuse it."""
        assert self._body is not None
        self._dropped = asyncio.Event()
        error = web.RequestPayloadError("its chunks are too small: send chunks of 1 KB or more, or a Content-Length")
        self._body.set_exception(error)

    async def _drop_rest(self) -> None:
        """Let the client send the rest of a body that the handler refused half read, so that it sees the answer."""
        assert self._dropped is not None
        self.leave_fifo()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                if not self._flow.is_over:
                    await self._dropped.wait()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer as aiohttp does, but in the API's format and without the parts of the request that aiohttp quotes."""
        super().handle_error(request, status, exc, message)
        if isinstance(exc, HttpProcessingError):
            error: ApiError = BadRequest(f"the request is not valid HTTP: {fault_of(exc)}")
        else:
            error = ApiError("internal error of the gateway")
        response = error_response(error, status=status)
        response.force_close()
        return response

    def refuse(self) -> ApiError:
        """Count this client as refused, and return the error that tells it to try again."""
        self._clients.refused[self.why_extra] += 1
        is_short = self.why_extra == "short"
        why = "the gateway is short of descriptors or memory" if is_short else "too many connections are open"
        return Unavailable(f"{why}: try again", code="overloaded", retry_after_s=RETRY_AFTER_S)

    def cut_if_late(self, now_s: float) -> str | None:
        """See Counted."""
        assert self._socket is not None
        if self._socket.is_closing():
            if self._closing_since_s is None:
                self._closing_since_s = now_s
            elif now_s - self._closing_since_s > CLOSING_S:
                self.end()
                return "closing"
            return None
        if self._head_since_s is not None and now_s - self._head_since_s > self._clients.head_s(self):
            self._socket.write(_LATE_HEAD)
            self.force_close()
            return "head"
        return None

    def end(self) -> None:
        """See Counted."""
        if self._socket is not None:
            self._socket.abort()


_NO_HEAD = (b"", b"\r\n")
"""Data that begins no head: some clients send a stray line end after a body."""


def _raw(error: ApiError, reason: str, fields: str) -> bytes:
    body = error.body()
    head = f"HTTP/1.1 {error.status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}{fields}\r\n\r\n".encode() + body


_LATE_HEAD = _raw(RequestTimeout("the request's head did not arrive in time"), "Request Timeout", "Connection: close")
_TOO_MANY = Unavailable("the gateway gets more requests than it can pass on: try again", code="overloaded")
_BUSY, _BUSY_LAST = (
    _raw(_TOO_MANY, "Service Unavailable", f"Retry-After: {RETRY_AFTER_S:.0f}{last}")
    for last in ("", "\r\nConnection: close")
)


_UNSURE = (b"\r\ntransfer-encoding:", b"\r\nexpect:")
"""Fields of a head after which nobody can tell how many bytes follow."""


def _missing(data: bytes) -> int | None:
    """Return the bytes of a request that are still to come after `data`. None: nobody can tell, or there is more."""
    head, _, body = data.partition(b"\r\n\r\n")
    lower = head.lower()
    length = lower.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0].strip()
    if not length.isdigit() or len(length) > MOST_DIGITS or any(field in lower for field in _UNSURE):
        return None
    missing = int(length) - len(body)
    return missing if missing >= 0 else None


def want_descriptors(connections: int) -> None:
    """Raise the process's limit of open descriptors, as far as allowed, to what `connections` may need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 2 * connections + OWN_DESCRIPTORS)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_connections(wanted: int, descriptors: int) -> int:
    """Return how many connections may be open: each may need one to an engine too. Log it if fewer than `wanted`."""
    possible = max(1, (descriptors - OWN_DESCRIPTORS) // 2)
    if possible < wanted:
        log.warning(
            "at most %d connections of clients may be open, not %d: the process may have %d file descriptors "
            "(ulimit -n), and a connection may need two",
            possible,
            wanted,
            descriptors,
        )
    return min(wanted, possible)


class LimitedServer(web.Server):
    """aiohttp's server, with connections that ClientConnections counts and bounds."""

    def __init__(
        self, plain: web.Server, connections: ClientConnections, tls: ssl.SSLContext | None, **options: Any
    ) -> None:
        """`plain`: the server that aiohttp made for the application."""
        begin = plain.request_factory

        def make(message: Any, payload: Any, protocol: Any, writer: AbstractStreamWriter, task: Any) -> web.BaseRequest:
            protocol.request_began(payload, _length(message), message.chunked)
            return begin(message, payload, protocol, writer, task)

        super().__init__(plain.request_handler, request_factory=make, handler_cancellation=plain.handler_cancellation)
        self._clients = connections
        self._tls = tls
        self._options = {**options, "loop": asyncio.get_running_loop()}

    def __call__(self) -> Any:
        """Return the protocol for a new connection."""
        return self._connection() if self._tls is None else Handshake(self._clients, self._tls, self._connection)

    def _connection(self) -> Connection:
        return Connection(self, self._clients, **self._options)

    async def shutdown(self, timeout: float | None = None) -> None:
        """Shut down as aiohttp does, after ending the handshakes, which aiohttp does not see."""
        for connection in list(self._clients.open):
            if isinstance(connection, Handshake):
                connection.end()
        await super().shutdown(timeout)


class LimitedRunner(web.AppRunner):
    """Serves an application to bounded connections. The application runs `ClientConnections.watch`."""

    __slots__ = ("_clients", "_options", "tls")

    def __init__(
        self,
        app: web.Application,
        connections: ClientConnections,
        *,
        shutdown_timeout: float,
        logger: logging.Logger,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`tls`: used after a client is admitted, so the runner's sites must be plain ones even with TLS."""
        super().__init__(app, handler_cancellation=True, shutdown_timeout=shutdown_timeout)
        self._clients = connections
        self.tls = tls
        self._options: dict[str, Any] = {
            "access_log": None,
            "logger": logger,
            "keepalive_timeout": connections.limits.idle_s,
            "lingering_time": LINGER_S,
            "auto_decompress": False,  # bodies are inflated in slices, when they are needed
        }

    async def _make_server(self) -> web.Server:
        return LimitedServer(await super()._make_server(), self._clients, self.tls, **self._options)


def _length(message: Any) -> int | None:
    """Return the length of a request's body, which the parser has checked."""
    length = message.headers.get("Content-Length")
    return None if length is None else int(length)


@web.middleware
async def refuse_extra(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """On connections beyond the bound, serve only OPEN_PATHS, and only one request each."""
    connection = request.protocol
    if not isinstance(connection, Connection) or not connection.why_extra:
        return await handler(request)
    response = (
        await handler(request) if request.path in OPEN_PATHS else error_response(connection.refuse(), path=request.path)
    )
    response.force_close()
    return response


def leaving_fifo(request: web.Request) -> Callable[[], None]:
    """Return a function to call when this request waits or is sent: it lets the next request be read. It may be called
    again."""
    protocol = request.protocol
    return protocol.leave_fifo if isinstance(protocol, Connection) else _nothing


def turns_of(request: web.Request) -> Turns:
    """Return the turns of the work for this request's connection."""
    protocol = request.protocol
    return protocol.turns if isinstance(protocol, Connection) else Turns()


def want_body(request: web.Request) -> None:
    """Read the body from now on. A request that is refused before is dropped unread."""
    protocol = request.protocol
    if isinstance(protocol, Connection):
        protocol.want_body()


def leave_fifo(request: web.Request) -> None:
    """Let the next request be read."""
    leaving_fifo(request)()


def _nothing() -> None:
    """Do nothing, for a request that came through no bounded connection."""
