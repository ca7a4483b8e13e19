"""Mistral: `[TOOL_CALLS] [{"name": "f", "arguments": {...}}]`, and since 2025 `[TOOL_CALLS]f[ARGS]{...}`."""

from __future__ import annotations

import re

from engine.text.calls.json_calls import JsonCalls
from engine.text.calls.machine import MAX_HEAD
from engine.text.calls.tools import Tools

OPEN = "[TOOL_CALLS]"
MARKS = (OPEN, "[ARGS]", "[CALL_ID]")
_NAMED = re.compile(r"\s*([\w.-]{1,128})\s*(?:\[CALL_ID\]\s*\w{1,64}\s*)?(?:\[ARGS\])?\s*(?=\{)")
_MAY_BE_NAMED = re.compile(r"\s*[\w.-]{0,128}\s*(?:\[[A-Z_]*\]?\s*\w{0,64}\s*)?(?:\[[A-Z]*\]?)?\s*\Z")


class Mistral(JsonCalls):
    """See the module."""

    def __init__(self, tools: Tools, *, is_beginning: bool) -> None:
        super().__init__((OPEN,), is_beginning=is_beginning)

    def _on_mark(self, mark: str) -> None:
        self._state = self._first

    def _first(self, ended: bool) -> bool:
        at = self._after_blank(ended)
        if at is None:
            return False
        first = self._rest[at] if at >= 0 else ""
        if first == "[":
            self._skip(at + 1)
            self._state = self._list
        elif first == "{":
            self._begin_object(self._text)
        else:
            self._state = self._named
        return True

    def _named(self, ended: bool) -> bool:
        head = self._rest[:MAX_HEAD]
        if (found := _NAMED.match(head)) is not None:
            self._begin_arguments(found[1], found.end(), self._text)
            return True
        if not ended and len(self._rest) < MAX_HEAD and _MAY_BE_NAMED.match(head) is not None:
            return False
        return self._give_up(0)

    def _list(self, ended: bool) -> bool:
        """The state in the list of calls."""
        at = self._after_blank(ended)
        if at is None:
            return False
        following = self._rest[at] if at >= 0 else ""
        if following == "{":
            self._begin_object(self._list)
        elif following == "," and not self._syntax:
            self._skip(at + 1)
        elif following == "]" and not self._syntax:
            self._rest = self._rest[at + 1 :]
            self._state = self._text
        else:
            return self._give_up(0)
        return True
