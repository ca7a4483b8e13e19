"""Write JSON bodies: set top-level fields and leave every other byte as it came, or write all fields anew."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from json import JSONDecoder
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

import orjson

from engine.contract.bounded_json import FREE_BYTES, commas_between_fields, loads
from engine.contract.errors import BadRequest

MAX_FIELDS = 1000
"""Most top-level fields of a body in which one is replaced: reading each takes about a microsecond."""
_NAME = re.compile(rb'[ \t\r\n]*+("[^"\\]*+(?:\\.[^"\\]*+)*+")', re.DOTALL)
_SPACE = re.compile(r"[ \t\r\n]*")
_value_end = JSONDecoder(parse_int=len, parse_float=len, object_pairs_hook=len).raw_decode
"""Finds where a value ends, without converting it: a number may have any number of digits. It builds lists and strings,
so it is only for small bodies. In those it is ten times as fast as the search that builds nothing."""


def body_of(fields: Mapping[str, Any]) -> bytes:
    """Return `fields`, which orjson has read, as a body. Raises BadRequest: orjson reads deeper nesting than it
    writes."""
    try:
        return orjson.dumps(fields)
    except orjson.JSONEncodeError as error:
        raise BadRequest(f"the request body is nested too deeply to change it: {error}") from None


def with_fields(body: bytes, present: Collection[str], new: Mapping[str, Any], removed: Collection[str] = ()) -> bytes:
    """Return `body`, a JSON object that orjson has read, with the fields `new` in front of its own.

    `present`: names of its top-level fields. All fields that `new` replaces, and those in `removed`, are removed, even
    repeated or escaped ones: of two fields with one name, one engine reads the first and another the last. Raises
    BadRequest if there are too many fields.
    """
    added = orjson.dumps(new)[1:-1]
    replaced = (new.keys() | set(removed)) & set(present)
    if not replaced:
        start = body.index(b"{") + 1
        return b"".join((body[:start], added, b"," if present else b"", memoryview(body)[start:]))
    start, end = body.index(b"{") + 1, body.rindex(b"}")
    kept = [member for name, member in _members(body, start, end) if name not in replaced]
    members = [added, *kept] if added else kept
    return b"".join((body[:start], b",".join(members), memoryview(body)[end:]))


def _members(body: bytes, start: int, end: int) -> Sequence[tuple[str, bytes]]:
    """Return each field of the object between `start` and `end`: its decoded name, and its whole text between
    commas."""
    if len(body) <= FREE_BYTES:
        with contextlib.suppress(RecursionError):
            return list(_small_members(body.decode()))
    return list(_large_members(body, start, end))


def _small_members(text: str) -> Iterator[tuple[str, bytes]]:
    at = text.index("{") + 1
    for _ in range(MAX_FIELDS):
        start = at
        name, at = scanstring(text, _skip(text, at) + 1, False)
        _, at = _value_end(text, _skip(text, _skip(text, at) + 1))
        at = _skip(text, at)
        yield name, text[start:at].encode()
        if text[at] == "}":
            return
        at += 1
    raise _too_many()


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _large_members(body: bytes, start: int, end: int) -> Iterator[tuple[str, bytes]]:
    commas = commas_between_fields(body)
    if len(commas) >= MAX_FIELDS:
        raise _too_many()
    for comma in (*commas.tolist(), end):
        name = _NAME.match(body, start)
        assert name is not None  # orjson has read the body, so it is valid
        yield loads(name[1]), body[start:comma]
        start = comma + 1


def _too_many() -> BadRequest:
    return BadRequest(f"the request body has more than {MAX_FIELDS} fields: leave out those that no engine knows")
