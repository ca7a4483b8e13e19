"""DeepSeek: V3 and R1 write the arguments in a block of Markdown, V3.1 and later without.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
```json
{...}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

import re

from engine.text.calls.json_arguments import JsonArguments
from engine.text.calls.machine import MAX_HEAD
from engine.text.calls.tools import Tools

ALL, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
OPEN, CLOSE, NAME_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
MARKS = (ALL, ALL_END, OPEN, CLOSE, NAME_END)
_HEAD = re.compile(
    rf"\s*(?:function{NAME_END}\s*([^\s<]{{1,128}})\s*```(?:json)?\s*|([^\s<]{{1,128}})\s*{NAME_END}\s*)(?=\{{)"
)


class DeepSeek(JsonArguments):
    """See the module."""

    def __init__(self, tools: Tools, *, is_beginning: bool) -> None:
        super().__init__((ALL, OPEN), is_beginning=is_beginning)

    def _on_mark(self, mark: str) -> None:
        self._state = self._calls if mark == ALL else self._head

    def _calls(self, ended: bool) -> bool:
        """The state between the calls."""
        at = self._after_blank(ended)
        if at is None:
            return False
        rest = self._rest[at:] if at >= 0 else ""
        if rest.startswith(OPEN):
            self._skip(at + len(OPEN))
            self._state = self._head
            return True
        if rest.startswith(ALL_END):
            self._rest, self._syntax = rest[len(ALL_END) :], ""
            self._state = self._text
            return True
        if rest and not ended and (OPEN.startswith(rest) or ALL_END.startswith(rest)):
            return False
        if self._syntax:
            return self._give_up(0)
        self._state = self._text
        return True

    def _head(self, ended: bool) -> bool:
        if (found := _HEAD.match(self._rest[:MAX_HEAD])) is not None:
            self._begin_arguments(found[1] or found[2], found.end(), self._fence)
            return True
        if len(self._rest) < MAX_HEAD and not ended and CLOSE not in self._rest:
            return False
        end = self._rest[:MAX_HEAD].find(CLOSE)
        return self._give_up(MAX_HEAD if end < 0 else end)

    def _fence(self, ended: bool) -> bool:
        return self._leave(("```",), self._close, ended)

    def _close(self, ended: bool) -> bool:
        return self._leave((CLOSE,), self._calls, ended)
