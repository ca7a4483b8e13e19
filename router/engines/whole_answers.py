"""Say what a whole answer with status 200 shows: an answer of its API, or something that only looks like one. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
    fields = _fields_of(body)
    if fields is None:
        return NoAnswer()
    if has_error(fields) and fields.get("type") != "message":
        error = error_of(fields)
        return ErrorEvent(error.code, meaning(error.message))
    failed = _FAILED.search(body) if body.find(b'_reason"') >= 0 else None
    if failed is not None and failed[1] == b"error":
        return ErrorEvent(None, None)
    if failed is not None or is_cut(body):
        return GaveUp()
    return ended(is_stream=False)


def _fields_of(body: bytes) -> Mapping[str, Any] | None:
    """Return the fields of a JSON object, or none of them if it is long; None if the body is something else, as far as
    that can be told in a short time."""
    if not (body[:64].lstrip().startswith(b"{") and body[-64:].rstrip().endswith(b"}")):
        return None
    if len(body) > PARSED_BYTES:
        return {}
    try:
        fields: dict[str, Any] = loads(body)
    except orjson.JSONDecodeError:
        return None
    return fields
