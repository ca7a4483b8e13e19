"""Recognize from the bytes of a whole answer that the engine failed or gave up, and what it says of itself.

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
from typing import Any

import orjson

from engine.contract.bounded_json import loads
from router.engines.attempt_result import Cause

MAX_BYTES = 2**14
"""Longest body that is searched. The errors of these engines have a few hundred bytes."""

MAX_PLAIN_BYTES = 512
"""Longest plain text that a server's router sends for an unknown path."""
_NO_MODEL = re.compile(r"(?:the )?model\W.{1,300}?\W(?:does not exist|not found|is not (?:found|loaded|served))")
"""vLLM: "The model `x` does not exist."; SGLang and others: "Model 'x' not found"."""

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
    and our own engine), a short plain text with `not found`, or nothing.
    """
    if status != 404:
        return status == 405
    text = body.strip().lower()
    if not text.startswith((b"{", b"[")):
        return not text or (len(text) <= MAX_PLAIN_BYTES and text.isascii() and b"not found" in text)
    words = _error_fields(body).get("message")
    return isinstance(words, str) and words.endswith("Not Found")


def is_unknown_model(status: int, body: bytes) -> bool:
    """Whether an engine's error says that it does not serve the model that the request names."""
    if status not in (400, 404) or len(body) > MAX_BYTES:
        return False
    error = _error_fields(body)
    message = error.get("message")
    return error.get("code") == "model_not_found" or (
        isinstance(message, str) and _NO_MODEL.match(message.lower()) is not None
    )


def _error_fields(body: bytes) -> dict[str, Any]:
    """Return the error in a body, with its text as `message`; empty if the body is no JSON object."""
    fields = _object(body)
    error = fields.get("error")
    if error is None:
        return {**fields, "message": fields.get("detail", fields.get("message"))}
    return error if isinstance(error, dict) else {"message": error}


_WHOLE_MESSAGE = re.compile(rb'\s*\{\s*"id"\s*:\s*"[^"]*"\s*,\s*"type"\s*:\s*"message"')


def is_cut(answer: bytes) -> bool:
    """Whether the engine gave up this answer, which is no stream and says no `abort`."""
    if _WHOLE_MESSAGE.match(answer) is not None:
        return answer.find(b'"stop_reason"') < 0
    if answer.find(b'"object":"response"') < 0 or answer.find(b'"output_tokens":0') < 0:
        return False
    response = _object(answer)
    made = response["usage"].get("output_tokens") if isinstance(response.get("usage"), dict) else None
    return (response.get("object"), response.get("status"), made) == ("response", "completed", 0)


def _object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`; empty if there is none."""
    try:
        value = loads(data)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
