"""A request's body as the proxy passes it on, kept within bounds until the decision."""

from __future__ import annotations

import asyncio

from engine.contract.errors import BadRequest
from router.edge.admission import Admitted
from router.edge.body import joined
from router.edge.errors import TooLarge
from router.edge.inflate import Inflater, NotCompressed, inflater_for


class Body:
    """One body. `add` its chunks; call `plain` when it is whole."""

    def __init__(self, admitted: Admitted, max_bytes: int, encoding: str | None) -> None:
        """`encoding`: the Content-Encoding. Raises UnsupportedEncoding."""
        self._admitted = admitted
        self._max_bytes = max_bytes
        self._inflater: Inflater | None = inflater_for(encoding)
        self._chunks: list[bytes] = []
        self._size = 0

    def add(self, chunk: bytes) -> None:
        """Add one chunk. Raises TooLarge, and TooManyRequests if there is no room for it."""
        self._count(len(chunk))
        self._chunks.append(chunk)

    def sent(self) -> bytes:
        """Return the whole body, as the client sent it, once `plain` has been called."""
        return self._chunks[0] if self._chunks else b""

    async def plain(self) -> bytes:
        """Return the whole body, inflated: the same object as `sent` if it is not compressed.

        Raises TooLarge, TooManyRequests, and BadRequest if it cannot be inflated. Other requests get their turn
        meanwhile.
        """
        if len(self._chunks) > 1:
            self._chunks = [await joined(self._chunks)]
        sent = self.sent()
        if self._inflater is None or not sent:
            return sent
        made = []
        try:
            for piece in self._inflater.inflate(sent):
                self._count(len(piece))
                made.append(piece)
                await asyncio.sleep(0)
            for piece in self._inflater.finish():
                self._count(len(piece))
                made.append(piece)
        except NotCompressed as error:
            raise BadRequest(f"the request's body cannot be read: {error}") from None
        return await joined(made)

    def _count(self, more: int) -> None:
        self._size += more
        if self._size > self._max_bytes:
            raise TooLarge(f"the request body is larger than {self._max_bytes} bytes")
        self._admitted.hold(self._size)
