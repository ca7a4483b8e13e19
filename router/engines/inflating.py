"""Read an answer that an engine, or a sidecar before it, has compressed although it was asked not to."""

from __future__ import annotations

from collections.abc import Iterator

from router.edge.inflate import Inflater, NotCompressed, inflater_for
from router.engines.engine_client import Body, BrokeOff


class InflatedBody:
    """A compressed body as its content, slice by slice."""

    def __init__(self, body: Body, inflater: Inflater) -> None:
        self._body = body
        self._inflater = inflater
        self._slices: Iterator[bytes] = iter(())
        """What is left of the last chunk."""
        self.is_read = False
        """See Body."""

    async def readany(self) -> bytes:
        """See Body."""
        try:
            while not self.is_read:
                for piece in self._slices:
                    if piece:
                        return piece
                chunk = await self._body.readany()
                self._slices = self._inflater.inflate(chunk) if chunk else self._end()
        except NotCompressed as damage:
            raise BrokeOff(f"its compressed body is damaged: {damage}") from None
        return b""

    def _end(self) -> Iterator[bytes]:
        yield from self._inflater.finish()
        self.is_read = True


def inflated(body: Body, coding: str) -> Body:
    """Return `body` without its content coding. Raises UnsupportedEncoding."""
    inflater = inflater_for(coding)
    return body if inflater is None else InflatedBody(body, inflater)
