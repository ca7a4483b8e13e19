"""Recognize an engine's state from its error messages: known texts of vLLM and SGLang, and no others.

HTTP statuses do not show it. A draining vLLM answers every new request with 500, and a full one with 503 without
Retry-After. A vLLM whose core was killed answers 500, or sends an error event in a stream. The known text is at the
beginning of the message, where no client can put it: errors quote the request only after it.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from router.engines.outcome import Outcome

MAX_BYTES = 2**14
"""Longest body that is searched. The errors of these engines have a few hundred bytes."""

GAVE_UP = "the engine gave the answer up"

_WORDS = {
    # vLLM 0.32 between SIGTERM and its end (--shutdown-timeout): new requests find the thread pool closed.
    "cannot schedule new futures after": Outcome.LEAVING,
    "server shutting down": Outcome.LEAVING,
    "server is shutting down": Outcome.LEAVING,
    "the engine is draining": Outcome.LEAVING,
    # vLLM, once its core process is gone, also for the few seconds until the server ends.
    "enginecore encountered an issue": Outcome.DEAD,
    "background loop has errored": Outcome.DEAD,
    # vLLM's --max-num-queued-reqs and --max-num-queued-tokens, SGLang's --max-queued-requests.
    "the engine is currently busy and cannot accept": Outcome.FULL,
    "the engine has reached its prefill token backlog": Outcome.FULL,
    "the request queue is full": Outcome.FULL,
}
_ABORTED = re.compile(rb'"finish_reason"\s*:\s*"abort"')
_EVENT = re.compile(rb"data: ?[^\r\n]*")


def meaning(message: str) -> Outcome | None:
    """Return what an engine's error message says about the engine; None if the text is not known."""
    said = message.strip().lower()
    return next((outcome for words, outcome in _WORDS.items() if said.startswith(words)), None)


def meaning_of_body(body: bytes) -> Outcome | None:
    """Return the meaning of an error's whole body, in OpenAI's format or SGLang's, with the message at the top."""
    if not body or len(body) > MAX_BYTES:
        return None
    try:
        answer: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return meaning(message) if isinstance(message, str) else None


def is_aborted(answer: bytes) -> bool:
    """Whether an engine gave up an answer and calls it finished, as vLLM does on SIGTERM, /sleep and /pause.

    A quote inside generated text is escaped, so the reason found is the engine's own.
    """
    return answer.find(b'"abort"') >= 0 and _ABORTED.search(answer) is not None


def before_abort(events: bytes) -> int | None:
    """Return how many bytes of `events` come before the first one that `is_aborted`; None if there is none."""
    if events.find(b'"abort"') < 0:
        return None
    return next((event.start() for event in _EVENT.finditer(events) if _ABORTED.search(event[0])), None)
