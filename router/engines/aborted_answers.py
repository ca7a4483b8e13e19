"""Detect answers that an engine cut off because of /sleep, /pause or SIGTERM, but ended as if they were complete.

vLLM 0.32 reports `abort` only in some cases:

| answer | cut before the first token | cut later |
|---|---|---|
| stream of a chat or completion | the usage, `[DONE]`, and no reason | `abort` |
| stream of a message | `end_turn` and 0 tokens | `end_turn`, as if complete |
| stream of a response | `response.completed` and 0 tokens | `response.completed`, as if complete |
| whole chat or completion | `abort` | `abort` |
| whole message | no `stop_reason` | no `stop_reason` |
| whole response | `completed` and 0 tokens | `completed`, as if complete |

The token that ends an answer is counted, so no complete answer has 0 tokens.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from engine.common.sse import DONE, DONE_DATA

# A quote inside generated text is escaped, so these can only be keys of the answer itself.
# Messages and responses have no such reason: a token count above 0 replaces it.
_REASON = re.compile(rb'"(?:finish_reason"\s*:\s*[^\sn]|output_tokens"\s*:\s*[1-9])')
_EVENT = re.compile(rb"(?:event: ?[^\r\n]*\r?\n)?data: ?([^\r\n]*)")
_WHOLE_MESSAGE = re.compile(rb'\s*\{\s*"id"\s*:\s*"[^"]*"\s*,\s*"type"\s*:\s*"message"')


def may_end(events: bytes) -> bool:
    """Whether `events` may have an end that `before_end` would find."""
    return events.endswith(DONE) or events.find(b'"choices":[]') >= 0 or events.find(b'"output_tokens":0') >= 0


def tells_reason(events: bytes) -> bool:
    """Whether `events` say why the answer ended, or that it has tokens."""
    return _REASON.search(events) is not None


def before_end(events: bytes) -> int | None:
    """Return how many bytes of `events` come before the first event that ends an answer without any token; None if
    there is no such event."""
    return next((event.start() for event in _EVENT.finditer(events) if _is_end(event[1])), None)


def is_end_alone(events: bytes) -> bool:
    """Whether `events` are only the end of a chat or completion, without a token before it."""
    return events.endswith(DONE) and not tells_reason(events) and before_end(events) == 0


def is_cut(answer: bytes) -> bool:
    """Whether the engine gave up this answer, which is no stream."""
    if _WHOLE_MESSAGE.match(answer) is not None:
        return answer.find(b'"stop_reason"') < 0
    if answer.find(b'"object":"response"') < 0 or answer.find(b'"output_tokens":0') < 0:
        return False
    response = _object(answer)
    return (response.get("object"), response.get("status"), _made(response)) == ("response", "completed", 0)


def _is_end(data: bytes) -> bool:
    if data == DONE_DATA:
        return True
    event = _object(data)
    kind = event.get("type")
    if kind == "message_delta":  # a request for 0 tokens gets another reason
        delta = event.get("delta")
        return isinstance(delta, dict) and delta.get("stop_reason") == "end_turn" and _made(event) == 0
    if kind == "response.completed":
        return _made(event.get("response")) == 0
    usage = event.get("usage")
    return event.get("choices") == [] and isinstance(usage, dict) and not usage.get("completion_tokens")


def _object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`; empty if there is none."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _made(answer: object) -> object:
    """Return the output tokens in the answer's usage; None without a usage."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    return usage.get("output_tokens") if isinstance(usage, dict) else None
