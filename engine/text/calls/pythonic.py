"""Llama 3.2 and 4: the answer is a list of calls in Python, `[f(city="Rome", days=2), g()]`."""

from __future__ import annotations

import json
import re

from engine.text.calls.machine import MAX_BLANK, MAX_HEAD, Machine, blank_end
from engine.text.calls.python_literal import PythonLiteral
from engine.text.calls.tools import Tools

OPEN, CLOSE = "<|python_start|>", "<|python_end|>"
MARKS = (OPEN, CLOSE)
_CALL = re.compile(r"\s*([A-Za-z_][\w.-]{0,127})\s*\(\s*(?:(?=\))|([A-Za-z_]\w{0,127})\s*=)")
_MAY_BE_CALL = re.compile(r"\s*(?:[A-Za-z_][\w.-]{0,127}\s*(?:\(\s*(?:[A-Za-z_]\w{0,127}\s*)?)?)?\Z")
_KEY = re.compile(r"\s*([A-Za-z_]\w{0,127})\s*=")
_MAY_BE_KEY = re.compile(r"\s*(?:[A-Za-z_]\w{0,127}\s*)?\Z")


class Pythonic(Machine):
    """See the module. Without a mark, only functions of the request make a list a list of calls."""

    def __init__(self, tools: Tools, *, is_beginning: bool) -> None:
        super().__init__((OPEN,), is_beginning=is_beginning)
        self._names = tools.names
        self._literal = PythonLiteral()
        if is_beginning:
            self._state = self._first

    def _on_mark(self, mark: str) -> None:
        self._state = self._list

    def _first(self, ended: bool) -> bool:
        at = self._after_blank(ended)
        if at is None:
            return False
        self._state = self._list if at >= 0 and self._rest[at] == "[" else self._text
        return True

    def _list(self, ended: bool) -> bool:
        at = self._after_blank(ended)
        if at is None:
            return False
        if at < 0 or self._rest[at] != "[":
            return self._give_up(0)
        self._skip(at + 1)
        self._state = self._call
        return True

    def _call(self, ended: bool) -> bool:
        head = self._rest[:MAX_HEAD]
        found = _CALL.match(head)
        if found is None or blank_end(head) > MAX_BLANK:
            if not ended and len(self._rest) < MAX_HEAD and _MAY_BE_CALL.match(head) is not None:
                return False
            return self._give_up(0)
        if found[1] not in self._names:
            return self._give_up(found.end())
        self._start_call(found[1], found.end())
        if found[2] is None:
            self._state = self._parameters_end
        else:
            self._key(found[2])
        return True

    def _key(self, key: str) -> None:
        self._argue(f"{', ' if self._has_arguments else '{'}{json.dumps(key)}: ")
        self._literal = PythonLiteral()
        self._state = self._value

    def _value(self, ended: bool) -> bool:
        piece, read, has_ended = self._literal.push(self._rest, ended)
        self._argue(piece)
        self._rest = self._rest[read:]
        if has_ended:
            self._state = self._parameters_end
        elif ended:
            self._close_call()
        return has_ended

    def _parameters_end(self, ended: bool) -> bool:
        """The state behind a value."""
        following, self._rest = self._rest[:1], self._rest[1:]
        if following == ",":
            self._state = self._next_key
            return True
        if following and following != ")":
            self._rest = following + self._rest
        self._close_call()
        return True

    def _next_key(self, ended: bool) -> bool:
        head = self._rest[:MAX_HEAD]
        if (found := _KEY.match(head)) is not None:
            self._rest = self._rest[found.end() :]
            self._key(found[1])
            return True
        if not ended and len(self._rest) < MAX_HEAD and _MAY_BE_KEY.match(head) is not None:
            return False
        at = blank_end(self._rest)
        self._rest = self._rest[at + 1 if self._rest[at : at + 1] == ")" else 0 :]
        self._close_call()
        return True

    def _close_call(self) -> None:
        if self._has_arguments:
            self._argue("}")
        self._end_call()
        self._state = self._between

    def _between(self, ended: bool) -> bool:
        """The state after a call."""
        at = self._after_blank(ended)
        if at is None:
            return False
        following = self._rest[at] if at >= 0 else ""
        if following == ",":
            self._skip(at + 1)
            self._state = self._call
        elif following == "]":
            self._rest = self._rest[at + 1 :]
            self._state = self._close
        else:
            self._state = self._text
        return True

    def _close(self, ended: bool) -> bool:
        return self._leave((CLOSE,), self._text, ended)
