"""Say what a whole answer with status 200 shows: an answer of its API, or something that only looks like one. Pure."""

from __future__ import annotations

import re
from typing import Any

import orjson

from engine.contract.bounded_json import loads
from engine.contract.message_errors import PATHS as MESSAGE_PATHS
from engine.contract.requests import Endpoint
from router.engines.attempt_result import ErrorEvent, GaveUp, NoAnswer, Observed, ended
from router.engines.engine_errors import is_cut, meaning
from router.engines.stream_events import error_of, has_error

PARSED_BYTES = 2**15
"""Longest answer that is parsed to see whether it is whole JSON, which takes some 0.1 ms. Of a longer one, the first
and the last byte are looked at."""
_JSON = frozenset((Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.RESPONSES, "/v1/embeddings")) | MESSAGE_PATHS
_FAILED = re.compile(rb'"finish_reason"\s*:\s*"(abort|error)"')


def observed_whole(endpoint: str, body: bytes) -> Observed:
    """Return what a whole answer to a request at `endpoint` shows."""
    if endpoint not in _JSON:
        return ended(is_stream=False)
    if not is_json_object(body):
        return NoAnswer()
    if body.find(b'"error') >= 0 and (error := _error(body)) is not None:
        return error
    failed = _FAILED.search(body) if body.find(b'_reason"') >= 0 else None
    if failed is not None and failed[1] == b"error":
        return ErrorEvent(None, None)
    if failed is not None or is_cut(body):
        return GaveUp()
    return ended(is_stream=False)


def is_json_object(body: bytes) -> bool:
    """Whether the body is a JSON object, as far as that can be told in a short time."""
    if not (body[:64].lstrip().startswith(b"{") and body[-64:].rstrip().endswith(b"}")):
        return False
    if len(body) > PARSED_BYTES:
        return True
    try:
        loads(body)
    except orjson.JSONDecodeError:
        return False
    return True


def _error(body: bytes) -> ErrorEvent | None:
    """Return the engine's error in an answer with status 200; None if there is none."""
    if len(body) > PARSED_BYTES:
        return None
    fields: dict[str, Any] = loads(body)
    if not has_error(fields) or fields.get("type") == "message":
        return None
    error = error_of(fields)
    return ErrorEvent(error.code, meaning(error.message))
