"""Server-sent events: encodes an event, decodes a byte stream.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html. OpenAI's API uses data fields only; Anthropic's
API also names its events.
"""

from __future__ import annotations

from collections.abc import Iterator

DONE_DATA = b"[DONE]"
"""Data of the last event of a stream in OpenAI's API, and in some engines' other APIs."""
DONE = b"data: %b\n\n" % DONE_DATA
"""The last event with that data."""


def sse_event(data: bytes) -> bytes:
    """Return an event with `data`, which must hold no line break."""
    return b"data: " + data + b"\n\n"


def named_event(name: str, data: bytes) -> bytes:
    """Return a named event with `data`, which must hold no line break."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


class SseDecoder:
    """Incremental decoder: it takes byte chunks of any size and yields the data of each complete event."""

    def __init__(self, max_event_bytes: int = 16 * 2**20) -> None:
        self._buffer = b""
        self._max_event_bytes = max_event_bytes

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of each event that `chunk` completes. Raises ValueError if an event exceeds the bound."""
        self._buffer += chunk
        if b"\r" in self._buffer and not self._buffer.endswith(b"\r"):
            self._buffer = self._buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *events, self._buffer = self._buffer.split(b"\n\n")
        for event in events:
            if event.startswith(b"data: ") and b"\n" not in event:  # the fast path for nearly all events
                yield event[6:]
                continue
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)
        if len(self._buffer) > self._max_event_bytes:
            raise ValueError(f"a server-sent event is larger than {self._max_event_bytes} bytes")
