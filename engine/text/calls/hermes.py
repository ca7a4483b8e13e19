"""Hermes and Qwen: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from engine.text.calls.json_calls import JsonCalls
from engine.text.calls.tools import Tools

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MARKS = (OPEN, CLOSE)


class Hermes(JsonCalls):
    """See the module. Templates put a line feed before the mark."""

    def __init__(self, tools: Tools, *, is_beginning: bool) -> None:
        super().__init__((f"\n{OPEN}", OPEN), is_beginning=is_beginning)

    def _on_mark(self, mark: str) -> None:
        self._begin_object(self._close)

    def _close(self, ended: bool) -> bool:
        return self._leave((CLOSE,), self._text, ended)
