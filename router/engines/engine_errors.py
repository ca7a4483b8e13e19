"""Recognize from the bytes of an answer that the engine failed or gave up, and what it says of itself.

HTTP statuses do not show it. A draining vLLM answers every new request with 500, and a full one with 503 without
Retry-After. A vLLM whose core was killed answers 500, or sends an error event in a stream. Only known texts of vLLM and
SGLang count. They are at the beginning of the message, where no client can put them: errors quote the request only
after it. A quote inside generated text is escaped, so the fields that are searched for can only be the engine's own.

An answer that the engine cut off because of /sleep, /pause or SIGTERM ends as if it were complete. vLLM 0.32 reports
`abort` only in some cases:

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
from typing import Any, NamedTuple

import orjson

from engine.common.sse import DONE, DONE_DATA, named_event, sse_event
from engine.contract.bounded_json import loads
from engine.contract.errors import MAX_MESSAGE_CHARS
from router.engines.attempt_result import Cause

MAX_BYTES = 2**14
"""Longest body that is searched. The errors of these engines have a few hundred bytes."""

GAVE_UP = "the engine gave the answer up"

_WORDS = {
    # vLLM 0.32 between SIGTERM and its end (--shutdown-timeout): new requests find the thread pool closed.
    "cannot schedule new futures after": Cause.LEAVING,
    "server shutting down": Cause.LEAVING,
    "server is shutting down": Cause.LEAVING,
    "the engine is draining": Cause.LEAVING,
    # vLLM, once its core process is gone, also for the few seconds until the server ends.
    "enginecore encountered an issue": Cause.DEAD,
    "background loop has errored": Cause.DEAD,
    # vLLM's --max-num-queued-reqs and --max-num-queued-tokens, SGLang's --max-queued-requests.
    "the engine is currently busy and cannot accept": Cause.FULL,
    "the engine has reached its prefill token backlog": Cause.FULL,
    "the request queue is full": Cause.FULL,
}


def meaning(message: str) -> Cause | None:
    """Return what an engine's error message says about the engine; None if the text is not known."""
    lowered = message.strip().lower()
    return next((cause for words, cause in _WORDS.items() if lowered.startswith(words)), None)


def meaning_of_body(body: bytes) -> Cause | None:
    """Return the meaning of an error's whole body, in OpenAI's format or SGLang's, with the message at the top."""
    if not body or len(body) > MAX_BYTES:
        return None
    try:
        answer: Any = loads(body)
    except orjson.JSONDecodeError:
        return None
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return meaning(message) if isinstance(message, str) else None


def is_unknown_path(status: int, body: bytes) -> bool:
    """Whether an engine's error says that the path is unknown, and not that a model or anything else is missing.

    That is 405, or 404 with the text of a known server: FastAPI's `detail`, a message that ends with `Not Found` (vLLM
    and our own engine), or no JSON at all.
    """
    if status != 404:
        return status == 405
    try:
        fields = loads(body)
    except orjson.JSONDecodeError:
        return True
    if not isinstance(fields, dict):
        return False
    error = fields.get("error")
    words = fields.get("detail", fields.get("message")) if error is None else error
    if isinstance(words, dict):
        words = words.get("message")
    return isinstance(words, str) and words.endswith("Not Found")


# -- error events, in streams whose status was 200 ---------------------------------------------------------------------

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
        data = orjson.dumps(loads(found[2]))
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
        error: Any = loads(found[-1][1])["error"]
    except orjson.JSONDecodeError:
        return EngineError("an error")
    if not isinstance(error, dict):
        return EngineError(_text(error)) if error else None
    kind = error.get("type")
    code = error["code"] if isinstance(error.get("code"), int) else None
    if kind in _CLIENTS_FAULTS or (code is not None and 400 <= code < 500):
        return None
    return EngineError(_text(error.get("message") or kind or "an error"), code)


def _text(value: object) -> str:
    try:
        return str(value)[:MAX_MESSAGE_CHARS]
    except RecursionError:  # orjson reads deeper nesting than Python writes
        return "an error"


# -- answers that were given up ----------------------------------------------------------------------------------------

_ABORTED = re.compile(rb'"finish_reason"\s*:\s*"abort"')
_DATA = re.compile(rb"data: ?[^\r\n]*")
# Messages and responses have no such reason: a token count above 0 replaces it.
_REASON = re.compile(rb'"(?:finish_reason"\s*:\s*[^\sn]|output_tokens"\s*:\s*[1-9])')
_EVENT = re.compile(rb"(?:event: ?[^\r\n]*\r?\n)?data: ?([^\r\n]*)")
_WHOLE_MESSAGE = re.compile(rb'\s*\{\s*"id"\s*:\s*"[^"]*"\s*,\s*"type"\s*:\s*"message"')


def is_aborted(answer: bytes) -> bool:
    """Whether an engine gave up an answer and calls it finished, as vLLM does on SIGTERM, /sleep and /pause."""
    return answer.find(b'"abort"') >= 0 and _ABORTED.search(answer) is not None


def before_abort(events: bytes) -> int | None:
    """Return how many bytes of `events` come before the first one that `is_aborted`; None if there is none."""
    if events.find(b'"abort"') < 0:
        return None
    return next((event.start() for event in _DATA.finditer(events) if _ABORTED.search(event[0])), None)


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
        value = loads(data)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _made(answer: object) -> object:
    """Return the output tokens in the answer's usage; None without a usage."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    return usage.get("output_tokens") if isinstance(usage, dict) else None
