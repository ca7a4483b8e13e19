"""Errors that engines send within a stream, whose status was 200: the engine's own fault, or the client's."""

from __future__ import annotations

import re
from typing import Any

import orjson

# A quote inside generated text is escaped, so `{"error":` at the start of an event can only be the engine's own word.
_ERROR_EVENT = re.compile(rb'(?:^|[\r\n])data: ?(\{\s*"error"\s*:[^\r\n]*)')


def engine_error(events: bytes) -> str | None:
    """What the last error event in `events` says, where the engine is at fault; None without such an event."""
    if b'"error"' not in events:
        return None
    found = _ERROR_EVENT.findall(events)
    if not found:
        return None
    try:
        error: Any = orjson.loads(found[-1])["error"]
    except orjson.JSONDecodeError:
        return "an error"
    if not isinstance(error, dict):
        return str(error) if error else None
    code, kind = error.get("code"), error.get("type")
    is_clients = kind == "invalid_request_error" or (isinstance(code, int) and 400 <= code < 500)
    return None if is_clients else str(error.get("message") or kind or "an error")
