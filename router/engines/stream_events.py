"""Say what one event of a stream is: a sign of life alone, a piece of the answer, its end, or a failure. Pure.

An answer begins with its first token, not with its first byte: engines and proxies send comments, pings, the role and
announcements before they compute anything. It ends with a mark, not with its connection.

| API | begins | says why it ends | end mark |
|---|---|---|---|
| chats, completions | a choice with text, a tool call, or a finish reason | `finish_reason` | `[DONE]` |
| messages | a delta with text, or a block of another kind | `stop_reason` | `message_stop` |
| responses | a delta with text, or an item of another kind | | `response.completed`, `.incomplete`, `.failed` |

An engine's error comes as `event: error`, as an object with `error` (with or without `choices` beside it), as a
`finish_reason` of `error`, or as `response.failed`. vLLM says `abort` when it gives an answer up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import Any, NamedTuple

import orjson

from engine.common.sse import DONE_DATA, named_event, sse_event
from engine.contract.bounded_json import loads
from engine.contract.errors import MAX_MESSAGE_CHARS


class Says(Enum):
    """What an event says."""

    NOTHING = auto()
    """The server lives: a comment, a ping, the role, an announcement, a usage. No token was computed for it."""
    TOKEN = auto()
    """A piece of the answer."""
    REASON = auto()
    """Why the answer ends, perhaps with its last piece."""
    END = auto()
    """The answer's end mark."""
    EMPTY_END = auto()
    """The end mark or the reason, with a count of no tokens: the engine gave up an answer that it had not begun."""
    ERROR = auto()
    """The engine failed."""
    REFUSAL = auto()
    """An error that is the client's."""
    ABORT = auto()
    """The engine gave up the answer but calls it finished."""

    __hash__ = object.__hash__
    """Enum's own hash is not a C function."""


class EngineError(NamedTuple):
    """The contents of an error. `code`: an HTTP status, if it has one."""

    message: str
    code: int | None = None


class StreamEvent(NamedTuple):
    """One event. `start`: where it begins in the bytes that were read. `name` is empty without one. `data`: its lines
    of data, joined by line feeds; empty for a comment."""

    start: int
    name: bytes
    data: bytes


_END_OF_EVENT = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
"""Two ends of a line; the end of a line with a return and a line feed is one."""
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_SEAM_BYTES = 3
"""Bytes of the longest end of an event, less one."""
_LINES = re.compile(rb"\r\n|\n|\r")
_CLIENTS_FAULTS = (
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
)
_FAILED_REASONS = {"error": Says.ERROR, "abort": Says.ABORT}
_NO_TOKENS = ("role", "content")
"""Fields of a chat's delta that are no token by themselves: the role, and a content that is checked apart."""
_ANNOUNCE = frozenset(("message_start", "ping", "content_block_stop"))
_RESPONSE_ENDS = frozenset(("response.completed", "response.incomplete"))
_RESPONSE_FAILURES = frozenset(("response.failed", "response.cancelled"))


def events_in(stream: bytes) -> Iterator[StreamEvent]:
    """Yield the complete events in `stream`, comments included. What follows the last complete event is left out."""
    start = 0
    has_returns = stream.find(b"\r") >= 0
    while True:
        if has_returns:
            found = _END_OF_EVENT.search(stream, start)
            end, after = (-1, -1) if found is None else found.span()
        else:
            end = stream.find(b"\n\n", start)
            after = end + 2
        if end < 0:
            return
        yield _event(start, stream[start:end])
        start = after


class EventSplitter:
    """Gives out the complete events of a stream that comes in chunks, and holds the beginning of the next one."""

    __slots__ = ("_held", "_seam", "held_bytes")

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._seam = b""
        """The last bytes since an event ended: the end of the next event may begin in them."""
        self.held_bytes = 0

    def feed(self, chunk: bytes) -> bytes:
        """Return all that is held, and of `chunk` what belongs to complete events; empty if none is complete.

        It searches only `chunk` and the few bytes before it, since an engine may send byte by byte.
        """
        if not self._seam and chunk.endswith(_EVENT_ENDS):  # nearly all chunks
            return chunk
        seam = self._seam
        seen = seam + chunk
        end = max(found + len(mark) if (found := seen.rfind(mark)) >= 0 else 0 for mark in _EVENT_ENDS) - len(seam)
        if end <= 0:
            self._seam = seen[-_SEAM_BYTES:]
            self._held.append(chunk)
            self.held_bytes += len(chunk)
            return b""
        events, rest = self.take_held() + chunk[:end], chunk[end:]
        self._seam = rest[-_SEAM_BYTES:]
        if rest:
            self._held, self.held_bytes = [rest], len(rest)
        return events

    def take_held(self) -> bytes:
        """Return what is held, and hold it no longer. What comes next still belongs to the same event."""
        held, self._held, self.held_bytes = b"".join(self._held), [], 0
        return held


def without_comments(events: bytes) -> bytes:
    """Return complete `events` without those that have neither a name nor data."""
    found = list(events_in(events))
    if all(event.name or event.data for event in found):
        return events
    ends = [*(event.start for event in found[1:]), len(events)]
    kept = zip(found, ends, strict=True)
    return b"".join([events[event.start : end] for event, end in kept if event.name or event.data])


def _event(start: int, event: bytes) -> StreamEvent:
    if event.startswith(b"data: ") and event.find(b"\n") < 0 and event.find(b"\r") < 0:  # nearly all events
        return StreamEvent(start, b"", event[6:])
    name, data = b"", []
    for line in _LINES.split(event):
        field, _, value = line.partition(b":")
        if field == b"event":
            name = value.removeprefix(b" ")
        elif field == b"data":
            data.append(value.removeprefix(b" "))
    return StreamEvent(start, name, b"\n".join(data))


def parsed(event: StreamEvent) -> dict[str, Any] | None:
    """Return the JSON object in the event's data; None if there is none."""
    try:
        value = loads(event.data)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def says(event: StreamEvent) -> Says:
    """Return what the event says. The data of an API that is not known counts as a piece of its answer."""
    if event.data == DONE_DATA:
        return Says.END
    if not event.data:
        return Says.ERROR if event.name == b"error" else Says.NOTHING
    fields = parsed(event)
    if event.name == b"error" or (fields is not None and has_error(fields)):
        return Says.REFUSAL if fields is not None and _is_clients_fault(fields) else Says.ERROR
    if fields is None:
        return Says.TOKEN
    choices = fields.get("choices")
    if isinstance(choices, list):
        return _of_choices(choices, fields.get("usage"))
    kind = fields.get("type")
    if not isinstance(kind, str):
        return Says.TOKEN if fields else Says.NOTHING
    return _of_response(kind, fields) if kind.startswith("response.") else _of_message(kind, fields)


def has_error(fields: Mapping[str, Any]) -> bool:
    """Whether the object reports an error, whatever stands beside it."""
    return bool(fields.get("error")) or fields.get("type") in ("error", *_RESPONSE_FAILURES)


def own_error(event: StreamEvent) -> bytes:
    """Return the engine's own error event as the client gets it, its data as JSON; empty if it is not JSON."""
    fields = parsed(event)
    if fields is None or "choices" in fields:
        return b""
    data = orjson.dumps(fields)
    return named_event(event.name.decode("latin-1"), data) if event.name else sse_event(data)


def error_in(event: StreamEvent) -> EngineError:
    """Return the error in an event that reports one."""
    fields = parsed(event)
    if fields is None:
        return EngineError(_text(event.data.decode("utf-8", "replace")) or "an error")
    return error_of(fields)


def error_of(fields: Mapping[str, Any]) -> EngineError:
    """Return the error in an object that reports one."""
    error = fields.get("error")
    if not error and isinstance(response := fields.get("response"), dict):
        error = response.get("error")
    if not error:
        error = fields
    if not isinstance(error, dict):
        return EngineError(_text(error))
    code = error.get("code")
    said = error.get("message") or error.get("detail") or error.get("type") or "an error"
    return EngineError(_text(said), code if type(code) is int else _status(error))


def _is_clients_fault(fields: Mapping[str, Any]) -> bool:
    error, code = fields.get("error"), error_of(fields).code
    kind = error.get("type") if isinstance(error, dict) else None
    return kind in _CLIENTS_FAULTS or (code is not None and 400 <= code < 500)


def _status(error: Mapping[str, Any]) -> int | None:
    """Return the HTTP status in an error, written as a string or beside it."""
    code = error.get("code", error.get("status"))
    return int(code) if isinstance(code, str) and len(code) == 3 and code.isdecimal() else None


def _text(value: object) -> str:
    try:
        return str(value)[:MAX_MESSAGE_CHARS]
    except RecursionError:  # orjson reads deeper nesting than Python writes
        return "an error"


def _made_no_tokens(usage: object) -> bool:
    """Whether a usage counts no token of the answer. The token that ends an answer is counted, so no complete answer
    has none."""
    if not isinstance(usage, dict):
        return False
    return usage.get("completion_tokens", usage.get("output_tokens")) == 0


def _made_tokens(usage: object) -> bool:
    made = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return type(made) is int and made > 0


def _of_choices(choices: list[Any], usage: object) -> Says:
    found = Says.NOTHING
    for choice in choices:
        if not isinstance(choice, dict):
            continue
        reason = choice.get("finish_reason")
        if reason:
            return _FAILED_REASONS.get(reason, Says.REASON) if isinstance(reason, str) else Says.REASON
        if _has_token(choice):
            found = Says.TOKEN
    # Some tokens have no text of their own, such as the first bytes of a letter.
    return Says.TOKEN if found is Says.NOTHING and _made_tokens(usage) else found


def _has_token(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text") or choice.get("token_ids") or choice.get("message"))
    if not isinstance(delta, dict):
        return bool(delta)
    if delta.get("content") or choice.get("token_ids"):
        return True
    return any(value for name, value in delta.items() if name not in _NO_TOKENS)


def _of_message(kind: str, event: Mapping[str, Any]) -> Says:
    match kind:
        case "content_block_delta":
            delta = event.get("delta")
            return Says.TOKEN if _has_piece(delta) else Says.NOTHING
        case "content_block_start":
            block = event.get("content_block")
            if not isinstance(block, dict) or block.get("type") not in ("text", "thinking"):
                return Says.TOKEN
            return Says.TOKEN if block.get("text") or block.get("thinking") else Says.NOTHING
        case "message_delta":
            delta = event.get("delta")
            reason = delta.get("stop_reason") if isinstance(delta, dict) else None
            # A request for 0 tokens gets another reason.
            if reason == "end_turn" and _made_no_tokens(event.get("usage")):
                return Says.EMPTY_END
            return Says.REASON if reason else Says.NOTHING
        case "message_stop":
            return Says.END
    return Says.NOTHING if kind in _ANNOUNCE else Says.TOKEN


def _of_response(kind: str, event: Mapping[str, Any]) -> Says:
    if kind in _RESPONSE_ENDS:
        response = event.get("response")
        usage = response.get("usage") if isinstance(response, dict) else None
        return Says.EMPTY_END if kind == "response.completed" and _made_no_tokens(usage) else Says.END
    if kind.endswith(".delta"):
        return Says.TOKEN if event.get("delta") else Says.NOTHING
    if kind == "response.output_item.added":
        item = event.get("item")
        is_empty = isinstance(item, dict) and item.get("type") in ("message", "reasoning")
        return Says.NOTHING if is_empty else Says.TOKEN
    is_done = kind.endswith(".done") and kind != "response.output_item.done"
    return Says.TOKEN if is_done and event.get("text") else Says.NOTHING


def _has_piece(delta: object) -> bool:
    return isinstance(delta, dict) and any(value for name, value in delta.items() if name != "type")
