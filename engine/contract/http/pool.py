"""Connections to one address, kept for the next request for as long as the server at its end keeps them."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohappyeyeballs
from aiohappyeyeballs import AddrInfoType

from engine.contract.http.connection import Connection, Sink

MAX_IDLE_S = 75.0
"""However long the server keeps idle connections."""
KEPT_S = 5.0
"""For so long a server is taken to keep an idle connection, until it is seen what it does: uvicorn's default, in front
of vLLM and SGLang."""
LEAST_KEPT_S = 1.0
"""What ends sooner was ended for another reason."""
MARGIN_S = 0.5
"""A connection is not used so short a time before the server may close it: a request that crosses the closing on its
way is lost."""
FRESH_S = 30.0
"""A connection that was never used is kept for so long: servers wait longer for a first request than for a second."""
TIDY_EVERY_S = 0.25
RESOLVED_S = 10.0
"""For so long a name has the addresses that were found."""
HAPPY_EYEBALLS_S = 0.25
"""RFC 8305, section 5: then the next address is tried beside the last."""
CLOSE_S = 10.0
"""An aborted connection is gone in the event loop's next turn; this bounds the wait should one never be."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is. `tls` None: plain HTTP."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None


class Pool:
    """The connections; of the idle ones the latest used is used first, so that few stay warm and the others run out.

    No limit: whoever asks bounds the requests. How long the server keeps a connection is learnt from how idle ones end,
    and from one that does not: of those that are too old for use, the oldest stays for that.
    """

    def __init__(self, address: Address, clock: Callable[[], float], *, receive_bytes: int | None = None) -> None:
        """`receive_bytes`: of the sockets' buffers; None: the system's."""
        self.clock = clock
        self.kept_s = KEPT_S
        """For so long the server keeps an idle connection, as far as is known."""
        self._address = address
        self._receive_bytes = receive_bytes
        self._found: Sequence[AddrInfoType] = ()
        self._found_at_s = -RESOLVED_S
        self._idle: deque[Connection] = deque()
        self._fresh: deque[Connection] = deque()
        """Opened ahead of need, and never used."""
        self._open: set[Connection] = set()
        self._connecting = 0
        self._opening_ahead = 0
        self._peak = 0.0
        self._tidied_s = 0.0
        self._none_open = asyncio.Event()

    @property
    def size(self) -> int:
        """Connections, in use or not, and those that are being made."""
        return len(self._open) + self._connecting

    def sinks(self) -> list[Sink]:
        """Of all responses under way."""
        return [connection.sink for connection in self._open if connection.sink is not None]

    def take(self) -> Connection | None:
        """An idle connection, no longer the pool's; None: open one."""
        in_use = self.size - self._opening_ahead - len(self._idle) - len(self._fresh) + 1
        if in_use > self._peak:
            self._peak = in_use
        if not self._idle and not self._fresh:
            return None
        now_s = self.clock()
        for _ in range(2):
            if self._idle and not self._idle[-1].closed and not self._is_old(self._idle[-1], now_s):
                return self._idle.pop()
            self._tidy(now_s)  # which costs more, and what it learns may make the connection one to use
        return self._fresh.pop() if self._fresh else None

    def missing(self, fades: float) -> int:
        """How many connections fewer there are than the most that were in use lately; that fades by a factor a call."""
        now_s = self.clock()
        self._tidy(now_s)
        self._peak *= fades
        too_old = sum(self._is_old(connection, now_s) for connection in self._idle)
        return max(0, int(self._peak) - (self.size - too_old))

    def _is_old(self, connection: Connection, now_s: float) -> bool:
        return now_s - connection.idle_since_s > self.kept_s - MARGIN_S

    def _tidy(self, now_s: float) -> None:
        """Forget closed connections at the ends, close old ones, learn from the oldest that is still open."""
        self._tidied_s = now_s
        idle, fresh = self._idle, self._fresh
        while idle and idle[-1].closed:
            idle.pop()
        while idle and (idle[0].closed or now_s - idle[0].idle_since_s > MAX_IDLE_S):
            idle.popleft().abort()
        if idle:
            self.kept_s = max(self.kept_s, now_s - idle[0].idle_since_s)
        while len(idle) > 1 and (idle[1].closed or self._is_old(idle[1], now_s)):
            idle[1].abort()
            del idle[1]
        while fresh and fresh[-1].closed:
            fresh.pop()
        while fresh and (fresh[0].closed or now_s - fresh[0].idle_since_s > FRESH_S):
            fresh.popleft().abort()

    async def connect(self) -> Connection:
        """A fresh connection. Raises OSError (of which ssl.SSLError is one); deadlines are the caller's."""
        self._connecting += 1
        try:
            return await self._connect()
        except OSError:
            self._found_at_s = -RESOLVED_S  # the name may have moved
            raise
        finally:
            self._connecting -= 1

    async def _connect(self) -> Connection:
        address, connection, is_made = self._address, Connection(self), False
        loop = asyncio.get_running_loop()
        made = await aiohappyeyeballs.start_connection(
            await self._addresses(),
            happy_eyeballs_delay=HAPPY_EYEBALLS_S,
            interleave=1,
            loop=loop,
            socket_factory=self._socket,
        )
        try:
            # A name for the certificate; where the context has one of its own, that goes first.
            name = address.host if address.tls else None
            await loop.create_connection(lambda: connection, sock=made, ssl=address.tls, server_hostname=name)
            is_made = True
        finally:
            if not is_made:  # uvloop closes the socket of a cancelled call without a word to a protocol that has it
                connection.abort()
                made.close()
                self.gone(connection)
        return connection

    async def _addresses(self) -> Sequence[AddrInfoType]:
        now_s = self.clock()
        if not self._found or now_s - self._found_at_s >= RESOLVED_S:
            self._found = _literal(self._address) or await asyncio.get_running_loop().getaddrinfo(
                self._address.host, self._address.port, type=socket.SOCK_STREAM
            )
            self._found_at_s = now_s
        return self._found

    def _socket(self, info: AddrInfoType) -> socket.socket:
        made = socket.socket(*info[:3])
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._receive_bytes is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_bytes)
        return made

    def opened(self, connection: Connection) -> None:
        """Told by a connection: it exists."""
        self._open.add(connection)

    def release(self, connection: Connection) -> None:
        """Told by a connection: its response is complete and it may carry another request."""
        self._idle.append(connection)
        if connection.idle_since_s - self._tidied_s > TIDY_EVERY_S:
            self._tidy(connection.idle_since_s)

    async def open_ahead(self) -> None:
        """A connection more, for the next request. Raises OSError; deadlines are the caller's."""
        self._opening_ahead += 1
        try:
            connection = await self.connect()
        finally:
            self._opening_ahead -= 1
        connection.idle_since_s = self.clock()
        self._fresh.append(connection)

    def gone(self, connection: Connection) -> None:
        """Told by a connection: it is closed."""
        self._open.discard(connection)
        if not self._open:
            self._none_open.set()

    def ended_idle(self, connection: Connection) -> None:
        """Told by a connection: the server has closed it while it carried nothing."""
        if connection.is_used:  # else its idle life had no beginning that servers count from
            self.kept_s = max(LEAST_KEPT_S, self.clock() - connection.idle_since_s)

    async def close(self) -> None:
        """Close every connection and wait until the event loop has forgotten them."""
        self._idle.clear()
        self._fresh.clear()
        self._none_open.clear()
        for connection in list(self._open):
            connection.abort()
        if self._open:
            async with asyncio.timeout(CLOSE_S):
                await self._none_open.wait()


def _literal(address: Address) -> Sequence[AddrInfoType]:
    """An address that is no name, as a look-up would give it; empty: it is a name."""
    try:
        parsed = ipaddress.ip_address(address.host)
    except ValueError:
        return []
    if "%" in address.host:  # with a scope, whose number the system knows
        return []
    if parsed.version == 4:
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address.host, address.port))]
    return [(socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address.host, address.port, 0, 0))]
