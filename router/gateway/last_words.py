"""What an engine says of itself when it does not do what was asked: known words of vLLM and SGLang, and no others.

Statuses do not tell: a vLLM that drains answers 500 to every new request, one that is full 503 without Retry-After, and
one whose core was killed 500, or an error event in a stream. The words stand at the beginning of the message, which no
client can put there: what errors quote of a request comes later.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from router.gateway.outcome import Outcome

MAX_BYTES = 2**14
"""Of a body that is looked at. These engines' own errors have some hundred bytes."""

GAVE_UP = "the engine gave the answer up"

_WORDS = {
    # vLLM 0.32 between SIGTERM and its end (--shutdown-timeout): what is new finds the thread pool closed.
    "cannot schedule new futures after": Outcome.LEAVING,
    "server shutting down": Outcome.LEAVING,
    "server is shutting down": Outcome.LEAVING,
    "the engine is draining": Outcome.LEAVING,
    # vLLM, once its core process is gone: for the few seconds until the server ends, too.
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
    """What an engine's error message says of the engine; None: nothing that is known."""
    said = message.strip().lower()
    return next((outcome for words, outcome in _WORDS.items() if said.startswith(words)), None)


def meaning_of_body(body: bytes) -> Outcome | None:
    """The same of an error's whole body, in OpenAI's shape or in SGLang's, which has the message outside."""
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
    """Whether an engine gave up an answer and calls it finished: vLLM on SIGTERM, /sleep and /pause.

    A quote inside generated text is escaped, so the words are the engine's own.
    """
    return b'"abort"' in answer and _ABORTED.search(answer) is not None


def before_abort(events: bytes) -> int | None:
    """How many bytes of `events` come before the first one that is_aborted; None without such an event."""
    if b'"abort"' not in events:
        return None
    return next((event.start() for event in _EVENT.finditer(events) if _ABORTED.search(event[0])), None)
