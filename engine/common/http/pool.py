"""A pool of connections to one address, kept for later requests as long as the server keeps them."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohappyeyeballs
from aiohappyeyeballs import AddrInfoType

from engine.common.http.connection import Connection, Sink

MAX_IDLE_S = 75.0
"""Longest time that an idle connection is kept, even if the server would keep it longer."""
KEPT_S = 5.0
"""Assumed time that a server keeps an idle connection, until its real time is seen: the default of uvicorn, which vLLM
and SGLang use."""
LEAST_KEPT_S = 1.0
"""Least time that the pool learns: a connection that ends sooner was ended for another reason."""
MARGIN_S = 0.5
"""The pool stops using a connection this long before the server may close it: a request that is sent while the server
closes is lost."""
FRESH_S = 30.0
"""Time that an unused connection is kept: servers wait longer for a first request than for a second."""
TIDY_EVERY_S = 0.25
MAX_ADDRESSES = 1024
"""Addresses of a name that are remembered, beyond those of FORGOTTEN_S."""
RESOLVED_S = 10.0
"""Time that the addresses found for a name are kept."""
FORGOTTEN_S = 30.0
"""A connection is used no more if the name has not led to its address for so long. A name with many addresses may give
out others each time."""
HAPPY_EYEBALLS_S = 0.25
"""Delay before the next address is tried in parallel (RFC 8305, section 5)."""
CLOSE_S = 10.0
"""Bound on the wait for aborted connections, which normally end in the event loop's next turn."""


@dataclass(frozen=True, slots=True)
class Address:
    """The server's address. `tls` None: plain HTTP."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None


class Pool:
    """The pool. It reuses the idle connection that was used last, so that few stay warm and the others expire.

    It has no limit: the caller bounds the requests. It learns how long the server keeps a connection from the ends of
    idle ones. To see such an end, it keeps the oldest of the connections that are too old for use.
    """

    def __init__(self, address: Address, clock: Callable[[], float], *, receive_bytes: int | None = None) -> None:
        """`receive_bytes`: size of the sockets' receive buffers; None: the system's default."""
        self.clock = clock
        self.kept_s = KEPT_S
        """Seconds that the server keeps an idle connection, as far as is known."""
        self._address = address
        self._receive_bytes = receive_bytes
        self._found: Sequence[AddrInfoType] = ()
        self._found_at_s = -RESOLVED_S
        self._led_to_s: dict[str, float] = {}
        """Addresses, and when the name last led there."""
        self._peers: dict[Connection, str] = {}
        """Where each open connection leads, if the server has a name."""
        self._idle: deque[Connection] = deque()
        self._fresh: deque[Connection] = deque()
        """Connections opened ahead of need and never used."""
        self._open: set[Connection] = set()
        self._connecting = 0
        self._opening_ahead = 0
        self._peak = 0.0
        self._tidied_s = 0.0
        self._none_open = asyncio.Event()

    @property
    def size(self) -> int:
        """Number of connections: in use, idle, and being opened."""
        return len(self._open) + self._connecting

    def sinks(self) -> list[Sink]:
        """Return the sinks of all responses in progress."""
        return [connection.sink for connection in self._open if connection.sink is not None]

    def take(self) -> Connection | None:
        """Take an idle connection out of the pool; None if there is none, so that the caller must open one."""
        in_use = self.size - self._opening_ahead - len(self._idle) - len(self._fresh) + 1
        if in_use > self._peak:
            self._peak = in_use
        if not self._idle and not self._fresh:
            return None
        now_s = self.clock()
        for _ in range(2):
            if self._idle and not self._idle[-1].closed and not self._is_old(self._idle[-1], now_s):
                return self._idle.pop()
            self._tidy(now_s)  # slower; but it may learn that the connection is not too old
        return self._fresh.pop() if self._fresh else None

    def missing(self, fades: float) -> int:
        """Return the recent peak of use less the present connections that are not too old, at least 0. Each call fades
        the peak."""
        now_s = self.clock()
        self._tidy(now_s)
        self._peak *= fades
        too_old = sum(self._is_old(connection, now_s) for connection in self._idle)
        return max(0, int(self._peak) - (self.size - too_old))

    def _is_old(self, connection: Connection, now_s: float) -> bool:
        return now_s - connection.idle_since_s > self.kept_s - MARGIN_S

    def _tidy(self, now_s: float) -> None:
        """Forget closed connections at both ends of the queues, close old ones, learn from the oldest that is open."""
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
        """Open a connection. Raises OSError (ssl.SSLError is one). The caller sets the deadline."""
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
            # The name that the certificate must have, unless the context sets its own.
            name = address.host if address.tls else None
            await loop.create_connection(lambda: connection, sock=made, ssl=address.tls, server_hostname=name)
            is_made = True
            if not _literal(address):
                self._peers[connection] = str(made.getpeername()[0])
        finally:
            if not is_made:  # uvloop closes the socket of a cancelled call without telling its protocol
                connection.abort()
                made.close()
                self.gone(connection)
        return connection

    async def renew(self) -> None:
        """Resolve the name again if it is time, and close the connections to addresses that it has left, each at the
        end of its request. A name that cannot be resolved keeps its addresses."""
        if not self._open or _literal(self._address) or self.clock() - self._found_at_s < RESOLVED_S:
            return
        try:
            await self._addresses()
        except OSError:
            self._found_at_s = self.clock()
            return
        for queue in (self._idle, self._fresh):
            for connection in [connection for connection in queue if self._is_left(connection)]:
                queue.remove(connection)
                connection.abort()

    def _is_left(self, connection: Connection) -> bool:
        """Return whether the name has led elsewhere for FORGOTTEN_S."""
        peer = self._peers.get(connection)
        return peer is not None and self._found_at_s - self._led_to_s.get(peer, -math.inf) > FORGOTTEN_S

    async def _addresses(self) -> Sequence[AddrInfoType]:
        now_s = self.clock()
        if not self._found or now_s - self._found_at_s >= RESOLVED_S:
            self._found = _literal(self._address) or await asyncio.get_running_loop().getaddrinfo(
                self._address.host, self._address.port, type=socket.SOCK_STREAM
            )
            self._found_at_s = now_s
            self._led_to_s |= {str(info[4][0]): now_s for info in self._found}
            if len(self._led_to_s) > MAX_ADDRESSES:
                self._led_to_s = {ip: at_s for ip, at_s in self._led_to_s.items() if now_s - at_s <= FORGOTTEN_S}
        return self._found

    def _socket(self, info: AddrInfoType) -> socket.socket:
        made = socket.socket(*info[:3])
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._receive_bytes is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_bytes)
        return made

    def opened(self, connection: Connection) -> None:
        """See Owner."""
        self._open.add(connection)

    def release(self, connection: Connection) -> None:
        """See Owner."""
        if self._peers and self._is_left(connection):
            connection.abort()
            return
        self._idle.append(connection)
        if connection.idle_since_s - self._tidied_s > TIDY_EVERY_S:
            self._tidy(connection.idle_since_s)

    async def open_ahead(self) -> None:
        """Open one more connection for a later request. Raises OSError. The caller sets the deadline."""
        self._opening_ahead += 1
        try:
            connection = await self.connect()
        finally:
            self._opening_ahead -= 1
        connection.idle_since_s = self.clock()
        self._fresh.append(connection)

    def gone(self, connection: Connection) -> None:
        """See Owner."""
        self._open.discard(connection)
        self._peers.pop(connection, None)
        if not self._open:
            self._none_open.set()

    def ended_idle(self, connection: Connection) -> None:
        """See Owner."""
        if connection.is_used:  # servers count the idle time from the end of a request
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
    """Return a numeric address in the form of a look-up's result; empty if it is a name."""
    try:
        parsed = ipaddress.ip_address(address.host)
    except ValueError:
        return []
    if "%" in address.host:  # it has a scope, whose number only the system knows
        return []
    if parsed.version == 4:
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address.host, address.port))]
    return [(socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address.host, address.port, 0, 0))]
