"""Reads engines' answers to a reset of the prefix cache: an answer of 200 may mean that nothing was emptied.

While a block is in use, vLLM empties nothing and answers 200 with `{"success": false}`.
"""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from engine.contract.bounded_json import loads

REPEATED_S = 10.0
"""Time for which a reset is repeated if the engine refuses it because blocks are in use. When requests end, their
blocks are free a step later."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0
_MAX_WORDS = 200


def refusal(body: bytes) -> str | None:
    """Return why the cache was not emptied, from the body of an answer with a status below 300; None if it was."""
    try:
        answer = loads(body)
    except orjson.JSONDecodeError:
        return None  # no body, or plain text such as SGLang's: then only the status counts
    if not isinstance(answer, dict) or answer.get("success") is not False:
        return None
    message = answer.get("message")
    words = f": {message[:_MAX_WORDS]}" if isinstance(message, str) and message else ""
    return f"the engine emptied nothing{words}, because blocks of its cache are in use: repeat it when no request runs"


def pauses_s() -> Iterator[float]:
    """Yield the seconds to wait before each repetition. They double up to one second, and their sum is REPEATED_S."""
    pause_s, left_s = _FIRST_PAUSE_S, REPEATED_S
    while left_s > 0:
        yield min(pause_s, left_s)
        left_s -= pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
