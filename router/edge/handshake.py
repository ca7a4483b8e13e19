"""A client's connection during the TLS handshake: it counts like any other, and has a deadline."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from router.edge.connection_limits import ClientConnections, Connection

log = logging.getLogger(__name__)


class Handshake(asyncio.Protocol):
    """Does the handshake, then hands over to the connection that `make` makes, with the data received so far."""

    def __init__(self, connections: ClientConnections, context: ssl.SSLContext, make: Callable[[], Connection]) -> None:
        self.why_extra = ""
        """See Counted."""
        self._connections = connections
        self._context = context
        self._make = make
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._early: list[bytes] = []
        self._is_ended = False
        self._is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)
        if not self._connections.admit(self, self._transport.get_extra_info("socket").fileno()):
            self._transport.abort()
            return
        self._task = asyncio.get_running_loop().create_task(self._agree(self._transport))

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol. The first request may come in the same packet as the end of the handshake."""
        self._early.append(data)

    def eof_received(self) -> None:
        """See asyncio.Protocol."""
        self._is_ended = True

    def connection_lost(self, exc: BaseException | None) -> None:
        """See asyncio.Protocol."""
        self._is_lost = True
        self._connections.left(self)

    def cut_if_late(self, now_s: float) -> str | None:
        """See Counted. A late handshake ends at its own timeout."""
        return None

    def end(self) -> None:
        """Cut the connection."""
        if self._task is not None:
            self._task.cancel()
        if self._transport is not None:
            self._transport.abort()

    async def _agree(self, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        limit_s = self._connections.head_s(self)
        try:
            async with asyncio.timeout(limit_s):
                secured = await loop.start_tls(
                    transport,
                    self,
                    self._context,
                    server_side=True,
                    ssl_handshake_timeout=2 * limit_s,  # the loop's default is 60 s, less than some limits
                )
        except (OSError, ssl.SSLError) as error:
            log.debug("the TLS handshake with a client failed: %s", error)
            self._connections.refused["handshake"] += isinstance(error, TimeoutError)
            transport.abort()
            return
        finally:
            self._connections.left(self)
        if secured is None or self._is_lost:
            return
        connection = self._make()
        secured.set_protocol(connection)
        connection.connection_made(secured)
        if self._early:
            connection.data_received(b"".join(self._early))
        if self._is_ended:
            connection.eof_received()
