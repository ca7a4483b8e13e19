"""What engines say when their prefix cache is to be emptied: an answer of 200 may mean that it was not.

vLLM empties nothing while a block is in use, and answers 200 with `{"success": false}`.
"""

from __future__ import annotations

from collections.abc import Iterator

import orjson

REPEATED_S = 10.0
"""A reset that the engine refuses for the blocks in use is repeated for so long: requests end, and their blocks are
free a step later."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0
_MAX_WORDS = 200


def refusal(body: bytes) -> str | None:
    """Why the cache was not emptied, from the body of an answer with a status below 300; None: it was."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None  # no body, or words such as SGLang's: then the status is all there is
    if not isinstance(answer, dict) or answer.get("success") is not False:
        return None
    message = answer.get("message")
    words = f": {message[:_MAX_WORDS]}" if isinstance(message, str) and message else ""
    return f"the engine emptied nothing{words}, as blocks of its cache are in use: repeat it when no request runs"


def pauses_s() -> Iterator[float]:
    """Seconds to wait before each repetition; they double up to a second, and make up REPEATED_S."""
    pause_s, left_s = _FIRST_PAUSE_S, REPEATED_S
    while left_s > 0:
        yield min(pause_s, left_s)
        left_s -= pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
