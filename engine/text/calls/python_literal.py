"""Turns a literal of Python into JSON text, piece by piece."""

from __future__ import annotations

import json
import re

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORD = re.compile(r"[^\s,:()\[\]{}\"']{1,128}")
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^xuU])", re.DOTALL)
_CODED = re.compile(r"\\(?:x[0-9a-fA-F]{0,1}|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|)\Z")
"""An escape whose end has not come."""
_PLAIN = {quote: re.compile(rf"[^\\{quote}]+") for quote in "\"'"}
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_JSON = {"(": "[", ")": "]", "[": "[", "]": "]", "{": "{", "}": "}", ",": ", ", ":": ": "}


class PythonLiteral:
    """One value. It is not checked: what is no literal becomes a text, so that the JSON is valid wherever the brackets
    are."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._word = ""

    def push(self, text: str, ended: bool) -> tuple[str, int, bool]:
        """Return the JSON text of `text`, how many characters were read, and whether the value has ended: with the
        comma or bracket that follows, which is not read."""
        out, at = [], 0
        while at < len(text):
            if self._quote:
                piece, end = self._in_string(text, at, ended)
                if end == at:
                    break
                out.append(piece)
                at = end
                continue
            char = text[at]
            if (found := _WORD.match(text, at)) is not None:
                self._word += found[0]
                at = found.end()
                if len(self._word) > 128:
                    out.append(self._taken())
                continue
            out.append(self._taken())
            if not self._depth and char in ",)]}":
                return "".join(out), at, True
            at += 1
            if char in "\"'":
                self._quote = char
                out.append('"')
            elif char in _JSON:
                self._depth += (char in "([{") - (char in ")]}")
                out.append(_JSON[char])
        if ended:
            out.append(self._taken() + ('"' if self._quote else ""))
        return "".join(out), at, False

    def _taken(self) -> str:
        word, self._word = self._word, ""
        if not word or _NUMBER.fullmatch(word):
            return word
        return _WORDS.get(word) or json.dumps(word, ensure_ascii=False)

    def _in_string(self, text: str, at: int, ended: bool) -> tuple[str, int]:
        if (plain := _PLAIN[self._quote].match(text, at)) is not None:
            return json.dumps(plain[0], ensure_ascii=False)[1:-1], plain.end()
        if text[at] == self._quote:
            self._quote = ""
            return '"', at + 1
        if (found := _ESCAPE.match(text, at)) is not None:
            return _unescaped(found[0]), found.end()
        if not ended and _CODED.match(text, at) is not None:
            return "", at
        return "\\\\", at + 1


def _unescaped(escape: str) -> str:
    """Return what an escape of Python stands for, as a part of a JSON string."""
    kind = escape[1]
    if kind == "u":
        return escape  # JSON has the same, for halves of pairs too
    if kind in "xU":
        code = int(escape[2:], 16)
        return json.dumps(chr(code) if code < 0x110000 else escape)[1:-1]
    if kind in "\\\"'":
        return json.dumps(kind)[1:-1]
    return json.dumps(_SIMPLE.get(kind, escape), ensure_ascii=False)[1:-1]
