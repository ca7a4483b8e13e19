"""Find error events in streams whose status was 200, and tell the engine's faults from the client's."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import orjson

from engine.common.sse import named_event, sse_event
from engine.contract.errors import MAX_MESSAGE_CHARS

# A quote inside generated text is escaped, so `{"error":` at the start of an event can only be the engine's own.
# At /v1/messages events have names, and an error's data begins with its type.
_ERROR_EVENT = re.compile(
    rb'(?:^|[\r\n])(?P<event>(?:event: ?error\r?\n)?data: ?)(\{\s*(?:"type"\s*:\s*"error"\s*,\s*)?"error"\s*:[^\r\n]*)'
)
_CLIENTS_FAULTS = (
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
)


class EngineError(NamedTuple):
    """The contents of an error event. `code`: an HTTP status, if it has one."""

    message: str
    code: int | None = None


def has_error(events: bytes) -> bool:
    """Whether there is an error event in `events`, whichever side is at fault."""
    return events.find(b'"error"') >= 0 and _ERROR_EVENT.search(events) is not None


def before_error(events: bytes) -> int:
    """Return how many bytes of `events` come before the first error event; all if there is none."""
    found = _ERROR_EVENT.search(events)
    return len(events) if found is None else found.start("event")


def error_event(events: bytes) -> bytes:
    """Return the first error event in `events`, its data as JSON; empty if there is none or it is not JSON."""
    found = _ERROR_EVENT.search(events)
    if found is None:
        return b""
    try:
        data = orjson.dumps(orjson.loads(found[2]))
    except orjson.JSONDecodeError:
        return b""
    return named_event("error", data) if found["event"].startswith(b"event") else sse_event(data)


def engine_error(events: bytes) -> EngineError | None:
    """Return the last error event in `events` if the engine is at fault for it; otherwise None."""
    if events.find(b'"error"') < 0:  # `in` takes three times as long: see `usage_in`
        return None
    found = _ERROR_EVENT.findall(events)
    if not found:
        return None
    try:
        error: Any = orjson.loads(found[-1][1])["error"]
    except orjson.JSONDecodeError:
        return EngineError("an error")
    if not isinstance(error, dict):
        return EngineError(_text(error)) if error else None
    kind = error.get("type")
    code = error["code"] if isinstance(error.get("code"), int) else None
    if kind in _CLIENTS_FAULTS or (code is not None and 400 <= code < 500):
        return None
    return EngineError(_text(error.get("message") or kind or "an error"), code)


def _text(said: object) -> str:
    try:
        return str(said)[:MAX_MESSAGE_CHARS]
    except RecursionError:  # orjson reads deeper nesting than Python writes
        return "an error"
