"""Wait for a stream's first token. What comes before it is held back, so that another pod can still be asked."""

from __future__ import annotations

from router.engines.engine_client import BrokeOff
from router.engines.inflating import Body
from router.engines.stream_events import end_of_events, without_comments
from router.engines.stream_reader import StreamReader

HELD_BYTES = 2**18
"""Most bytes of announcements (a response's repeats fields of the request) that are held back."""


async def beginning(body: Body, reader: StreamReader) -> bytes:
    """Return the stream up to its first token, and what has come with that.

    Comments are dropped: they say only that the server lives. Raises BrokeOff if the stream ends without a token, and
    as `StreamReader.read` and `Body.readany`.
    """
    held = partial = b""
    while chunk := await body.readany():
        at = max(0, len(partial) - 3)  # an event's end may begin in what has come
        partial += chunk
        if end := end_of_events(partial, at):
            events, partial = partial[:end], partial[end:]
            reader.read(events)
            if reader.has_begun:
                return held + events + partial
            held += without_comments(events)
        if len(held) + len(partial) > HELD_BYTES:
            reader.has_begun = True
            return held + partial
    if partial:
        reader.read(partial + b"\n\n")  # the last event may lack its blank line
        if reader.has_begun:
            return held + partial
    raise BrokeOff("the stream ended without a token")
