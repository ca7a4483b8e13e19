"""Keep the part of a stream that its client was sent: unparsed while all goes well, parsed if its pod breaks."""

from __future__ import annotations

from collections.abc import Callable

from engine.common.sse import SseDecoder
from engine.contract.requests import Endpoint
from router.continuing.transcript import Said
from router.continuing.transcript_messages import MessageSaid
from router.continuing.transcript_responses import ResponseSaid

FOLD_BYTES = 2**14
"""Bytes of events that are kept as they came. Beyond this they are parsed (about 0.1 ms) and dropped."""
MAX_TEXT_BYTES = 2**18
"""Longest text of an answer that is kept, in bytes."""
RESERVE_BYTES = 2**12
"""Memory is reserved in steps of this many bytes, not for every chunk."""
_CHUNK_BYTES = 48
"""Memory of a chunk besides its own bytes: the object's header, and its place in a list."""
_SAID = {Endpoint.MESSAGES: MessageSaid, Endpoint.RESPONSES: ResponseSaid}


def said_at(endpoint: Endpoint) -> Said:
    """Return the empty state of an answer of that endpoint."""
    return _SAID.get(endpoint, Said)(endpoint)


class Record:
    """Keeps what a client was sent of a stream, within bounds. Once it exceeds them, nothing is kept."""

    __slots__ = ("_chunks", "_decoder", "_endpoint", "_keep", "_more_at", "_reserved", "_said", "_size", "is_kept")

    def __init__(self, endpoint: Endpoint, keep: Callable[[int], bool]) -> None:
        """`keep` reserves the given bytes, or returns False."""
        self._keep = keep
        self._chunks: list[bytes] = []
        self._size = 0
        """Bytes of memory that the chunks take."""
        self._reserved = self._more_at = 0
        self._endpoint = endpoint
        self._decoder: SseDecoder | None = None
        self._said: Said | None = None
        """Made with the decoder when something has to be parsed, which most answers never need."""
        self.is_kept = True
        """False if the stream exceeded the bounds, so nothing of it is kept."""

    def add(self, chunk: bytes) -> None:
        """Add a `chunk` that the client was sent: whole events, or a part of an event too long to hold back."""
        self._chunks.append(chunk)
        self._size += len(chunk) + _CHUNK_BYTES
        if self._size > self._more_at:
            self._more()

    def _more(self) -> None:
        if not self.is_kept:
            self._drop()
            return
        if self._size > FOLD_BYTES:
            self._fold()
        text_bytes = 0 if self._said is None else self._said.text_bytes
        wanted = self._size + text_bytes
        while self.is_kept and self._reserved < wanted:
            self.is_kept = text_bytes <= MAX_TEXT_BYTES and self._keep(RESERVE_BYTES)
            self._reserved += RESERVE_BYTES
        self._more_at = min(FOLD_BYTES, self._reserved - text_bytes)
        if not self.is_kept:
            self._drop()

    def _fold(self) -> Said:
        if self._said is None or self._decoder is None:
            self._said, self._decoder = said_at(self._endpoint), SseDecoder(MAX_TEXT_BYTES)
        try:
            for data in self._decoder.feed(b"".join(self._chunks)):
                self._said.read(data)
        except ValueError:  # an event without an end
            self.is_kept = False
        self._chunks.clear()
        self._size = 0
        return self._said

    def _drop(self) -> None:
        self._chunks.clear()
        self._size = self._more_at = 0

    def read(self) -> Said:
        """Parse all that was added and return the state of the answer."""
        return self._fold()
