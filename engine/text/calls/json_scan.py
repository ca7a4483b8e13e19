"""Finds the end of JSON values in text that comes in pieces, without building anything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from json.decoder import scanstring  # type: ignore[attr-defined]  # CPython's own, not in its stubs

_INSIDE = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["\[\]{}]')
_STRICT = re.compile(r"[^\s,:\w.+-]")
"""What is neither white space nor a part of a number or a word: brackets, quotes, and what no JSON has there."""
_BRACKETS = '"[]{}'
_SPACE = re.compile(r"\s*")
_SCALAR = re.compile(r"[\w.+-]+")


class JsonScan:
    """Scans one object, list or string. It counts brackets and does not check the rest, so that a value with a mistake
    in it ends where its author meant it to."""

    def __init__(self, *, is_strict: bool = False) -> None:
        """`is_strict`: stop at characters that no JSON has outside of strings."""
        self._pattern = _STRICT if is_strict else _OUTSIDE
        self._depth = 0
        self._in_string = self._is_escaped = False
        self.is_foreign = False
        """Whether the scan has stopped at such a character."""

    def end(self, text: str, at: int = 0) -> int:
        """Scan `text` from `at`. Return where the value ends, or where a foreign character is; -1 if it goes on."""
        if self._is_escaped and at < len(text):
            self._is_escaped = False
            at += 1
        while at < len(text):
            found = (_INSIDE if self._in_string else self._pattern).search(text, at)
            if found is None:
                return -1
            char, at = found[0], found.end()
            if char == "\\" and self._in_string:
                if at == len(text):
                    self._is_escaped = True
                at += 1
            elif char == '"':
                self._in_string = not self._in_string
                if not self._in_string and not self._depth:
                    return at
            elif char not in _BRACKETS:
                self.is_foreign = True
                return found.start()
            else:
                self._depth += 1 if char in "[{" else -1
                if self._depth <= 0:
                    return at
        return -1


def members(text: str) -> Iterator[tuple[str, str]]:
    """Yield the key and the JSON text of each member of an object. Raises ValueError if it is none."""
    at = _after_space(text, 0)
    if text[at : at + 1] != "{":
        raise ValueError("no object")
    at = _after_space(text, at + 1)
    while text[at : at + 1] != "}":
        if text[at : at + 1] != '"':
            raise ValueError("no key")
        key, at = scanstring(text, at + 1)
        at = _after_space(text, at)
        if text[at : at + 1] != ":":
            raise ValueError("no colon")
        at = _after_space(text, at + 1)
        end = _value_end(text, at)
        yield key, text[at:end]
        at = _after_space(text, end)
        if text[at : at + 1] == ",":
            at = _after_space(text, at + 1)
        elif text[at : at + 1] != "}":
            raise ValueError("no comma")


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _value_end(text: str, at: int) -> int:
    if text[at : at + 1] in ('"', "[", "{"):
        end = JsonScan().end(text, at)
        if end < 0:
            raise ValueError("no end")
        return end
    found = _SCALAR.match(text, at)
    if found is None:
        raise ValueError("no value")
    return found.end()
