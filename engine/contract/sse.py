"""Server-sent events: encode one, decode a byte stream.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html. OpenAI's API uses data fields only, Anthropic's
names its events too.
"""

from __future__ import annotations

from collections.abc import Iterator

DONE = b"data: [DONE]\n\n"


def sse_event(data: bytes) -> bytes:
    """One event that carries `data`, which must hold no line break."""
    return b"data: " + data + b"\n\n"


def named_event(name: str, data: bytes) -> bytes:
    """One event with a name, that carries `data`, which must hold no line break."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


class SseDecoder:
    """Incremental decoder: feed it any byte chunks, it yields the data of each complete event."""

    def __init__(self, max_event_bytes: int = 16 * 2**20) -> None:
        self._buffer = b""
        self._max_event_bytes = max_event_bytes

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Data of each event completed by `chunk`. Raises ValueError when one event outgrows the bound."""
        self._buffer += chunk
        if b"\r" in self._buffer and not self._buffer.endswith(b"\r"):
            self._buffer = self._buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *events, self._buffer = self._buffer.split(b"\n\n")
        for event in events:
            if event.startswith(b"data: ") and b"\n" not in event:  # nearly all of them
                yield event[6:]
                continue
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)
        if len(self._buffer) > self._max_event_bytes:
            raise ValueError(f"a server-sent event is larger than {self._max_event_bytes} bytes")
