"""Llama 3: the answer is `{"name": "f", "parameters": {...}}`, perhaps after `<|python_tag|>`, several with `;`
between them."""

from __future__ import annotations

from engine.text.calls.json_calls import JsonCalls
from engine.text.calls.tools import Tools

OPEN = "<|python_tag|>"
MARKS = (OPEN,)


class LlamaJson(JsonCalls):
    """See the module. Without a mark, only a function of the request makes an object a call."""

    def __init__(self, tools: Tools, *, is_beginning: bool) -> None:
        super().__init__((OPEN,), is_beginning=is_beginning, names=tools.names)
        if is_beginning:
            self._state = self._first

    def _on_mark(self, mark: str) -> None:
        self._begin_object(self._between)

    def _first(self, ended: bool) -> bool:
        at = self._after_blank(ended)
        if at is None:
            return False
        if at >= 0 and self._rest[at] == "{":
            self._begin_object(self._between)
        else:
            self._state = self._text
        return True

    def _between(self, ended: bool) -> bool:
        """The state after a call."""
        at = self._after_blank(ended)
        if at is None:
            return False
        following = self._rest[at] if at >= 0 else ""
        if following in (";", ",") and not self._syntax:
            self._skip(at + 1)
        elif following == "{":
            self._begin_object(self._between)
        elif self._syntax:
            return self._give_up(0)
        else:
            self._state = self._text
        return True
