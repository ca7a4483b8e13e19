"""Parts of a prompt whose order changes from request to request: documents, tools, keys of JSON objects."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

import orjson

from engine.contract.keys import FIELD_SEPARATOR, MESSAGE_END

SEPARATORS = (b"\n\n", b"\n")
MIN_UNIT_BYTES = 24
"""Shorter lines are often equal by chance."""
_MOST_OPENINGS = 8
"""Number of brackets in a line that are tried as the beginning of a JSON value."""
_LABEL = re.compile(
    rb"[\s#*\[(<-]*(?:(?:documents?|docs?|sources?|passages?|contexts?|chunks?|results?)\b[\s#\[(]*\d*|\d+)[\s.:)\]>*-]+",
    re.IGNORECASE,
)


def body(unit: bytes) -> bytes:
    """Return a unit without its label in the list, such as a number."""
    label = _LABEL.match(unit)
    return unit[label.end() :] if label else unit


def moved_units(a: bytes, i: int, b: bytes, j: int) -> tuple[bytes, list[bytes]] | None:
    """Return the separator, and the units that a[i:] and b[j:] order differently, up to the end of the message."""
    for separator in SEPARATORS:
        left, right = _units(a, i, separator), _units(b, j, separator)
        position = {unit: k for k, unit in enumerate(right)}
        common = [unit for unit in dict.fromkeys(left) if unit in position]
        order = [position[unit] for unit in common]
        if len(common) >= 2 and order != sorted(order):
            return separator, common
    return None


def _units(text: bytes, at: int, separator: bytes) -> list[bytes]:
    start = max(text.rfind(separator, 0, at) + len(separator), text.rfind(FIELD_SEPARATOR, 0, at) + 1)
    if text.rfind(separator, 0, at) < 0 and text.rfind(FIELD_SEPARATOR, 0, at) < 0:
        start = 0
    end = text.find(MESSAGE_END, at)
    parts = text[start : end if end >= 0 else len(text)].split(separator)
    return [unit for part in parts if len(unit := body(part)) >= MIN_UNIT_BYTES]


def sort_units(text: bytes, separator: bytes, rank: Mapping[bytes, int]) -> bytes:
    """Return the text with its units of known rank sorted. Other units and the list labels keep their places."""
    parts = re.split(rb"(" + re.escape(separator) + rb"|[\x1e\x1f])", text)
    places: list[int] = []

    def settle() -> None:
        bodies = sorted((body(parts[k]) for k in places), key=lambda unit: (rank[unit], unit))
        for k, unit in zip(places, bodies, strict=True):
            parts[k] = parts[k][: len(parts[k]) - len(body(parts[k]))] + unit
        places.clear()

    for k in range(0, len(parts), 2):
        if body(parts[k]) in rank:
            places.append(k)
        if k + 1 < len(parts) and parts[k + 1] in (FIELD_SEPARATOR, MESSAGE_END):
            settle()
    settle()
    return b"".join(parts)


def json_at(text: bytes, at: int) -> tuple[int, int, Any] | None:
    """Return bounds and value of the outermost JSON object or array around byte `at` that begins on the line of that
    byte."""
    start = max(text.rfind(mark, 0, at) + 1 for mark in (b"\n", FIELD_SEPARATOR, MESSAGE_END))
    for opening in itertools.islice(re.finditer(rb"[{\[]", text[start:at]), _MOST_OPENINGS):
        found = decode_json(text, start + opening.start())
        if found and found[0] > at:
            return start + opening.start(), *found
    return None


def decode_json(text: bytes, start: int) -> tuple[int, Any] | None:
    """Return end and value of the JSON that begins at `start`."""
    end = text.find(MESSAGE_END, start)
    content = text[start : end if end >= 0 else len(text)].decode(errors="surrogateescape")
    try:
        value, length = json.JSONDecoder().raw_decode(content)
    except (ValueError, RecursionError):  # no JSON, or an integer of more digits than Python reads
        return None
    return start + len(content[:length].encode(errors="surrogateescape")), value


def sorted_json(value: Any) -> bytes:
    """Return compact JSON with keys in alphabetical order."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def sorted_tools(tools: bytes) -> bytes:
    """Return the tools' JSON with tools and keys in alphabetical order."""
    return b"[" + b",".join(sorted(sorted_json(tool) for tool in orjson.loads(tools))) + b"]"
