"""gpt-oss (harmony): an answer is several messages, each to a channel.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f
    <|constrain|>json<|message|>{...}<|call|>

Format: https://github.com/openai/harmony/blob/main/docs/format.md
"""

from __future__ import annotations

import re
from collections.abc import Callable

from engine.text.calls.events import Reasoning
from engine.text.calls.machine import MAX_HEAD, Machine, Marks
from engine.text.calls.tools import Tools

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
MARKS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
_ENDS = Marks(END, CALL, RETURN, START, CHANNEL)
_BEGINNINGS = (START, CHANNEL, "to=", "assistant")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_TO = re.compile(r"\bto=functions\.([\w.-]{1,128})")


class Harmony(Machine):
    """See the module. The channel `analysis` is reasoning."""

    def __init__(self, tools: Tools | None, *, is_beginning: bool) -> None:
        """`tools`: None: calls are text."""
        super().__init__((START, CHANNEL, END, CALL, RETURN), is_beginning=is_beginning)
        self._may_call = tools is not None
        self._emit: Callable[[str], None] = self._say
        if is_beginning:
            self._state = self._between

    @property
    def is_reasoning(self) -> bool:
        """See Reader."""
        return self._state == self._body and self._emit == self._think

    def _on_mark(self, mark: str) -> None:
        if mark in (START, CHANNEL):
            self._state = self._header
        else:
            self._syntax = ""
            self._state = self._between

    def _between(self, ended: bool) -> bool:
        """The state before a message."""
        at = self._after_blank(ended)
        if at is None:
            return False
        rest = self._rest[at:] if at >= 0 else ""
        if any(rest.startswith(mark) for mark in _BEGINNINGS):
            self._state = self._header
        elif rest and not ended and any(mark.startswith(rest) for mark in _BEGINNINGS):
            return False
        else:
            self._state = self._text
        return True

    def _header(self, ended: bool) -> bool:
        head = self._rest[: MAX_HEAD + len(MESSAGE)]
        end = head.find(MESSAGE)
        if end < 0:
            if not ended and len(self._rest) < MAX_HEAD + len(MESSAGE):
                return False
            return self._give_up(MAX_HEAD)
        header = self._syntax + head[:end]
        channel, to = _CHANNEL.search(header), _TO.search(header)
        if to is not None and self._may_call:
            self._start_call(to[1], end + len(MESSAGE))
            self._emit = self._argue
        elif channel is None and to is None:
            return self._give_up(end + len(MESSAGE))
        else:
            self._rest, self._syntax = self._rest[end + len(MESSAGE) :], ""
            is_analysis = channel is not None and channel[1] == "analysis" and to is None
            self._emit = self._think if is_analysis else self._say
        self._state = self._body
        return True

    def _body(self, ended: bool) -> bool:
        at, mark = _ENDS.find(self._rest)
        if ended and not mark:
            at = len(self._rest)
        self._emit(self._rest[:at])
        self._rest = self._rest[at:]
        if not mark:
            return False
        if self._is_open:
            self._end_call()
        self._syntax = ""
        if mark in (START, CHANNEL):
            self._skip(len(mark))
            self._state = self._header
        else:
            self._rest = self._rest[len(mark) :]
            self._state = self._between
        return True

    def _think(self, text: str) -> None:
        if text:
            self._events.append(Reasoning(text))
