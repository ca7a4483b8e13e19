"""Server-sent events: encodes an event, decodes a byte stream.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html. OpenAI's API uses data fields only; Anthropic's
API also names its events.
"""

from __future__ import annotations

from collections.abc import Iterator

DONE_DATA = b"[DONE]"
"""Data of the last event of a stream in OpenAI's API, and in some engines' other APIs."""
DONE = b"data: %b\n\n" % DONE_DATA
"""That last event, as bytes."""


def sse_event(data: bytes) -> bytes:
    """Return an event with `data`, which must hold no line break."""
    return b"data: " + data + b"\n\n"


def named_event(name: str, data: bytes) -> bytes:
    """Return a named event with `data`, which must hold no line break."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


GATHERED_FROM = 2**16
"""If more bytes than this wait for the end of their event, chunks are kept in a list: searching all these bytes anew
with each chunk would cost the square of the event's size."""


class SseDecoder:
    """Incremental decoder: it takes byte chunks of any size and yields the data of each complete event."""

    def __init__(self, max_event_bytes: int = 16 * 2**20) -> None:
        self._buffer = b""
        self._held = b""
        """A carriage return at the end of the bytes so far: a line feed may follow, which belongs to it."""
        self._gathered: list[bytes] = []
        """Chunks of a large event that has not ended; `_buffer` then has only their last byte."""
        self._gathered_bytes = 0
        self._max_event_bytes = max_event_bytes

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of each event that `chunk` completes. Raises ValueError if an event exceeds the bound."""
        chunk = self._with_line_feeds(chunk)
        self._buffer += chunk
        if self._gathered:
            self._gathered.append(chunk)
            self._gathered_bytes += len(chunk)
            if b"\n\n" not in self._buffer:
                self._check(self._gathered_bytes)
                self._buffer = self._buffer[-1:]
                return
            self._buffer = b"".join(self._gathered)
            self._gathered = []
        *events, self._buffer = self._buffer.split(b"\n\n")
        for event in events:
            if event.startswith(b"data: ") and b"\n" not in event:  # the fast path for nearly all events
                yield event[6:]
                continue
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)
        waiting = len(self._buffer)
        if waiting > self._max_event_bytes or waiting > GATHERED_FROM:
            self._check(waiting)
            self._gathered, self._gathered_bytes = [self._buffer], waiting
            self._buffer = self._buffer[-1:]

    def _with_line_feeds(self, chunk: bytes) -> bytes:
        """Return the chunk with line feeds for all ends of lines."""
        if self._held:
            chunk, self._held = self._held + chunk, b""
        if b"\r" not in chunk:
            return chunk
        if chunk.endswith(b"\r"):
            chunk, self._held = chunk[:-1], b"\r"
        return chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _check(self, event_bytes: int) -> None:
        if event_bytes > self._max_event_bytes:
            raise ValueError(f"a server-sent event is larger than {self._max_event_bytes} bytes")
