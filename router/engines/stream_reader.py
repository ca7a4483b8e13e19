"""Follow an engine's stream: whether its first token has come, whether its end mark has, and its token counts.

What comes before the first token is held back, so that another pod can still be asked (`beginning`).
"""

from __future__ import annotations

import re

from engine.contract.message_errors import PATHS as MESSAGE_PATHS
from engine.contract.requests import Endpoint
from router.engines.attempt_result import ErrorEvent, GaveUp
from router.engines.engine_client import Body, BrokeOff
from router.engines.engine_errors import GAVE_UP, meaning
from router.engines.stream_events import (
    EventSplitter,
    Says,
    StreamEvent,
    error_in,
    events_in,
    own_error,
    says,
    without_comments,
)
from router.engines.usage import USAGE, Tail, Usage, stream_usage, usage_in

_REASON = re.compile(rb'_reason"\s*:\s*"')
_RESPONSE_END = re.compile(rb"response\.(?:comp|inco|fail|canc)")
_HAS_REASON = re.compile(rb'"finish_reason"\s*:')
_IS_ALIVE = frozenset((Says.TOKEN, Says.REASON, Says.END, Says.REFUSAL))
HELD_BYTES = 2**18
"""Most bytes of announcements (a response's repeats fields of the request) that are held back."""
_HEAD_BYTES = 256
"""Bytes at the beginning of an event that hold its type."""
_CHATS = frozenset((Endpoint.CHAT, Endpoint.COMPLETIONS))


def _may_matter_in_chat(events: bytes) -> bool:
    # Four searches for a literal take as long as one search for a pattern with two branches.
    return (
        events.find(b"error") >= 0
        or events.find(b"[DONE]") >= 0
        or _REASON.search(events) is not None
        or USAGE.search(events) is not None
    )


def _may_matter_in_message(events: bytes) -> bool:
    return events.find(b"error") >= 0 or events.find(b"message_") >= 0


def _may_matter_in_response(events: bytes) -> bool:
    return events.find(b"error") >= 0 or _RESPONSE_END.search(events) is not None


def _may_matter_elsewhere(events: bytes) -> bool:
    return events.find(b"error") >= 0 or events.find(b"[DONE]") >= 0 or USAGE.search(events) is not None


class StreamFailed(Exception):
    """An event says that the engine failed, or that it gave the answer up.

    `at`: where the event begins in the bytes that were read. `event`: the engine's own error as the client may get it;
    empty without one.
    """

    def __init__(self, at: int, observed: ErrorEvent | GaveUp, message: str, event: bytes = b"") -> None:
        super().__init__(message)
        self.at = at
        self.observed = observed
        self.message = message
        self.event = event


class StreamReader:
    """Reads one stream. Once its first token has come, it parses only the events that may matter."""

    __slots__ = (
        "_answers",
        "_begun_usage",
        "_is_refused",
        "_is_rest",
        "_long",
        "_may_matter",
        "_reasons",
        "_tells_reason",
        "_usage",
        "has_begun",
        "has_end",
        "is_known",
    )

    def __init__(self, endpoint: str, answers: int = 1, *, is_rest: bool = False) -> None:
        """`answers`: how many answers the stream has, each with a reason for its end. `is_rest`: it is the rest of
        another stream, which may lack nothing but its end."""
        self._answers = answers
        self._is_rest = is_rest
        self._is_refused = False
        """Whether the engine ended the answer for a fault of the client."""
        self.is_known = endpoint in _CHATS or endpoint in MESSAGE_PATHS or endpoint == Endpoint.RESPONSES
        """Whether the API's end marks are known."""
        if endpoint in _CHATS:
            self._may_matter = _may_matter_in_chat
        elif endpoint in MESSAGE_PATHS:
            self._may_matter = _may_matter_in_message
        elif endpoint == Endpoint.RESPONSES:
            self._may_matter = _may_matter_in_response
        else:
            self._may_matter = _may_matter_elsewhere
        self._reasons = 0
        self._tells_reason = False
        """Whether the engine sends the field that will say why an answer ends."""
        self._begun_usage = self._usage = b""
        """The data of the first and of the last event with a usage."""
        self._long: Tail | None = None
        """The end of an event that is too long to be read whole, if it ends the answer."""
        self.has_begun = False
        """Whether the first token has come, or the reason for an end without one."""
        self.has_end = False
        """Whether the end mark has come."""

    @property
    def is_over(self) -> bool:
        """Whether the answer may end here: its end mark has come, or every reason, or its API is not known."""
        return self.has_end or self._reasons >= self._answers or not self.is_known

    def read(self, events: bytes) -> None:
        """Read complete events. Raises StreamFailed."""
        if self.has_begun and not self._may_matter(events):
            return
        for event in events_in(events):
            self._take(event)

    def is_alive(self, events: bytes) -> bool:
        """Whether an event of `events` shows that the engine works: a piece of the answer, or its end."""
        return any(says(event) in _IS_ALIVE for event in events_in(events))

    def read_part(self, part: bytes, *, is_first: bool, is_last: bool) -> None:
        """Read a part of an event that is too long to be held back. Only the event that ends a response is so long."""
        self.has_begun = True
        if is_first:
            self._long = Tail() if _RESPONSE_END.search(part[:_HEAD_BYTES]) is not None else None
        if self._long is not None:
            self._long.add(part)
            if is_last:
                self.has_end = True
                self._usage = self._long.last_bytes()

    def usage(self, *, is_broken: bool = False) -> Usage:
        """Return the token counts so far. `is_broken`: the stream broke off."""
        counts = stream_usage(self._usage, is_broken=is_broken)
        counts.is_final &= not self._is_refused
        return counts.or_else(usage_in(self._begun_usage)) if self._begun_usage else counts

    def _take(self, event: StreamEvent) -> None:
        what = says(event)
        if what is Says.NOTHING or what is Says.TOKEN:
            if what is Says.TOKEN and not self.has_begun:
                self.has_begun = True
                self._tells_reason = _HAS_REASON.search(event.data) is not None
        elif what is Says.REASON:
            self.has_begun = True
            self._reasons += 1
        elif what is Says.END:
            self._end(event)
        elif what is Says.REFUSAL:
            self.has_begun = self.has_end = self._is_refused = True
        elif what is Says.EMPTY_END and (self.has_begun or self._is_rest):
            self.has_begun = True
            self._reasons += 1
            self.has_end |= self._may_matter is _may_matter_in_response
        elif what is Says.ERROR:
            error = error_in(event)
            observed = ErrorEvent(error.code, meaning(error.message))
            raise StreamFailed(event.start, observed, error.message, own_error(event))
        else:
            raise StreamFailed(event.start, GaveUp(), GAVE_UP)
        if event.data.find(b'"usage"') >= 0 and USAGE.search(event.data) is not None:
            self._begun_usage = self._begun_usage or event.data
            self._usage = event.data

    def _end(self, event: StreamEvent) -> None:
        """Take the end mark. Raises StreamFailed if no token came before it, or no reason although the engine tells
        reasons."""
        has_reason = self._reasons > 0 or self._may_matter is not _may_matter_in_chat
        if not has_reason and (self._tells_reason or not self.has_begun) and not self.has_end:
            raise StreamFailed(event.start, GaveUp(), GAVE_UP)
        self.has_begun = self.has_end = True


async def beginning(body: Body, reader: StreamReader) -> bytes:
    """Return the stream up to its first token, and what has come with that.

    Comments are dropped: they say only that the server lives. Raises BrokeOff if the stream ends without a token, and
    as `StreamReader.read` and `Body.readany`.
    """
    held, splitter = b"", EventSplitter()
    while chunk := await body.readany():
        if events := splitter.feed(chunk):
            reader.read(events)
            if reader.has_begun:
                return held + events + splitter.take_held()
            held += without_comments(events)
        if len(held) + splitter.held_bytes > HELD_BYTES:
            reader.has_begun = True
            return held + splitter.take_held()
    if partial := splitter.take_held():
        reader.read(partial + b"\n\n")  # the last event may lack its blank line
        if reader.has_begun:
            return held + partial
    raise BrokeOff("the stream ended without a token")
