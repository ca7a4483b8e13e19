"""Qwen3-Coder: parameters as elements, which become the JSON text of an object.

<tool_call>
<function=f>
<parameter=city>
Rome
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
import re

from engine.text.calls.machine import MAX_BLANK, MAX_HEAD, MAX_HELD, Machine, Marks
from engine.text.calls.tools import Tools

OPEN, CLOSE, FUNCTION, FUNCTION_END = "<tool_call>", "</tool_call>", "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MARKS = (OPEN, CLOSE)
_VALUE_ENDS = Marks(f"\n{PARAMETER_END}", PARAMETER_END, f"\n{FUNCTION_END}\n{CLOSE}")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_NAME = re.compile(r"([^\s<>]{1,128})>")


class QwenXml(Machine):
    """See the module. The value of a parameter that takes text passes as it comes; any other is held back until it is
    known to be JSON, and is a text if it is none."""

    def __init__(self, tools: Tools, *, is_beginning: bool) -> None:
        super().__init__((f"\n{OPEN}", OPEN, f"\n{FUNCTION}", FUNCTION), is_beginning=is_beginning)
        self._tools = tools
        self._name = ""
        self._takes_text = True
        self._looked_at = 0
        """Characters of a value that have been searched for its end."""

    def _on_mark(self, mark: str) -> None:
        self._state = self._named if mark.endswith(FUNCTION) else self._function

    def _function(self, ended: bool) -> bool:
        at = self._after_blank(ended)
        if at is None:
            return False
        rest = self._rest[at:] if at >= 0 else ""
        if rest.startswith(FUNCTION):
            self._skip(at + len(FUNCTION))
            self._state = self._named
            return True
        if rest and FUNCTION.startswith(rest) and not ended:
            return False
        return self._give_up(0)

    def _named(self, ended: bool) -> bool:
        found = _NAME.match(self._rest)
        if found is None:
            if not ended and len(self._rest) < MAX_HEAD and not re.search(r"[\s<]", self._rest):
                return False
            return self._give_up(0)
        self._name = found[1]
        self._start_call(self._name, found.end())
        self._state = self._parameters
        return True

    def _parameters(self, ended: bool) -> bool:
        """The state between the parameters."""
        at = self._after_blank(ended)
        if at is None:
            return False
        rest = self._rest[at:] if at >= 0 else ""
        if rest.startswith(PARAMETER):
            end = rest.find(">", 0, MAX_HEAD)
            if end < 0 and len(rest) < MAX_HEAD and not ended:
                return False
            if end >= 0:
                self._key(rest[len(PARAMETER) : end])
                self._rest = rest[end + 1 :]
                self._state = self._line_feed
                return True
        elif rest and not ended and any(mark.startswith(rest) for mark in (PARAMETER, FUNCTION_END)):
            return False
        elif rest.startswith(FUNCTION_END):
            self._rest = rest[len(FUNCTION_END) :]
        if self._has_arguments:
            self._argue("}")
        self._end_call()
        self._state = self._close
        return True

    def _key(self, key: str) -> None:
        self._argue(f"{', ' if self._has_arguments else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._takes_text = self._tools.takes_text(self._name, key)

    def _line_feed(self, ended: bool) -> bool:
        """One line feed before the value belongs to the format."""
        if not self._rest and not ended:
            return False
        self._rest = self._rest.removeprefix("\n")
        if self._takes_text:
            self._argue('"')
        self._state = self._words if self._takes_text else self._value
        self._looked_at = 0
        return True

    def _words(self, ended: bool) -> bool:
        at, mark = _VALUE_ENDS.find(self._rest)
        if ended and not mark:
            at = len(self._rest)
        self._argue(_escaped(self._rest[:at]))
        self._rest = self._rest[at:]
        return self._end_value(mark, '"') if mark or ended else False

    def _value(self, ended: bool) -> bool:
        at, mark = _VALUE_ENDS.find(self._rest[: MAX_HELD + len(FUNCTION_END) + len(CLOSE) + 2], self._looked_at)
        if at > MAX_HELD or (not mark and ended):
            self._argue('"')
            self._state = self._words
            return True
        if not mark:
            self._looked_at = at
            return False
        self._argue(_json_of(self._rest[:at]))
        self._rest = self._rest[at:]
        return self._end_value(mark, "")

    def _end_value(self, mark: str, quote: str) -> bool:
        self._argue(quote)
        self._rest = self._rest[len(mark) if mark.endswith(PARAMETER_END) else 0 :]
        self._state = self._parameters
        return True

    def _close(self, ended: bool) -> bool:
        return self._leave((CLOSE,), self._text, ended)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_of(text: str) -> str:
    """Return a value that may be JSON, as JSON."""
    stripped = text.strip()
    if len(stripped) <= MAX_BLANK and stripped in _PYTHON:
        return _PYTHON[stripped]
    try:
        json.loads(stripped, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return stripped


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
