"""Get the rest of a broken stream from another pod: make the request, and rewrite the answer so that it continues.

Pure. From the request and the answer so far, it makes the body that asks for the rest. It turns the events of the rest
into events that continue those the client has. `continuations.py` has the ways to give the text so far to the other
engine. Each API has its own module for its requests and events.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any

import orjson

from engine.contract.bounded_json import loads
from engine.contract.requests import Endpoint
from router.continuing.chats import ChatApi
from router.continuing.continuations import CONSTRAINTS, COUNTS_OUTPUT, Api, Continuation, Rewriter
from router.continuing.messages import MessageApi
from router.continuing.responses import ResponseApi
from router.continuing.transcript import Transcript

_APIS: Mapping[str, Api] = {
    Endpoint.CHAT: ChatApi(Endpoint.CHAT),
    Endpoint.COMPLETIONS: ChatApi(Endpoint.COMPLETIONS),
    Endpoint.MESSAGES: MessageApi(),
    Endpoint.RESPONSES: ResponseApi(),
}
RESUMED = frozenset(_APIS)
"""Endpoints whose streams can be resumed."""
MAX_BODY_BYTES = 2**20
"""Largest request body that is parsed again to ask for the rest. That blocks the loop for about 10 ms."""
MAX_STOP_CHARS = 4096
"""Most characters of all stop strings together. Their beginnings are looked for at the end of the text: the time for
this grows with the square of a string's length, and is half a millisecond for a string of this length."""
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")
_COMPLETE = b'"answer_complete"'
"""Our engine's error code if nothing is left to generate."""


def fields_of(body: bytes) -> dict[str, Any]:
    """Return the fields of a request; none if they could not be written again, since orjson reads deeper nesting than
    it writes."""
    fields: dict[str, Any] = loads(body)
    try:
        orjson.dumps(fields)
    except orjson.JSONEncodeError:
        return {}
    return fields


def obstacle(endpoint: Endpoint, fields: Mapping[str, Any], transcript: Transcript) -> str:
    """Return what makes it impossible to get the rest from any other pod; empty if nothing does."""
    if transcript.obstacle:
        return transcript.obstacle
    if transcript.is_empty or transcript.finish or transcript.is_done:
        return ""
    if transcript.is_closed:
        return "end"  # the text ended, and no other pod can tell why
    for name in _LIMITS:
        if type(fields.get(name)) not in (int, NoneType):
            return name  # some engines read "100" as a number, but nothing can be subtracted from it
    api = _APIS[endpoint]
    for name, value in fields.items():
        if value is None or name in api.free or name in COUNTS_OUTPUT or name in CONSTRAINTS:
            continue
        # `1 == True` in Python.
        if not any(value == allowed and type(value) is type(allowed) for allowed in api.only.get(name, ())):
            return name
    text, stops = transcript.text, _stops(fields.get(api.stop))
    if sum(map(len, stops)) > MAX_STOP_CHARS or any(text.endswith(s[:length]) for s in stops for length in _lengths(s)):
        return "stop"  # the rest may complete the stop string, whose beginning is sent already
    return ""


def continuation_of(
    card: Mapping[str, Any], endpoint: Endpoint, fields: Mapping[str, Any], transcript: Transcript
) -> Continuation | None:
    """Return how to give the text so far to the engine with this model card; None if there is none."""
    return Continuation.ANEW if transcript.is_empty else _APIS[endpoint].continuation_of(card, fields, transcript)


def ask(endpoint: Endpoint, fields: Mapping[str, Any], transcript: Transcript, continuation: Continuation) -> bytes:
    """Return the body that asks for the rest."""
    return orjson.dumps(
        dict(fields) if continuation is Continuation.ANEW else _APIS[endpoint].asked(fields, transcript, continuation)
    )


def path_of(endpoint: Endpoint, continuation: Continuation) -> Endpoint:
    """Return the endpoint that is asked for the rest."""
    return _APIS[endpoint].path(continuation)


def ending(
    endpoint: Endpoint, fields: Mapping[str, Any], transcript: Transcript, prompt_tokens: int | None
) -> bytes | None:
    """See Api."""
    return _APIS[endpoint].ending(fields, transcript, prompt_tokens)


def rewriter_of(
    endpoint: Endpoint, transcript: Transcript, continuation: Continuation, prompt_tokens: int | None
) -> Rewriter:
    """Return the rewriter of the engine's answer to `ask`. `prompt_tokens`: those of the request, if known."""
    return _APIS[endpoint].rewriter(transcript, continuation, prompt_tokens)


def is_complete(refusal: object) -> bool:
    """Whether an engine refused because the answer has all its tokens, whose number the gateway only estimates."""
    return isinstance(refusal, bytes) and _COMPLETE in refusal


def _lengths(stop: str) -> range:
    return range(1, len(stop) + 1)


def _stops(given: object) -> list[str]:
    listed = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    return [stop for stop in listed if isinstance(stop, str)]
