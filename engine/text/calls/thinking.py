"""Reasoning between two marks at the beginning of an answer, such as `<think>` and `</think>`."""

from __future__ import annotations

from engine.text.calls.events import Event, Reasoning, Text
from engine.text.calls.machine import MAX_BLANK, Marks, Reader, blank_end

PAIRS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""The marks of Qwen, DeepSeek, GLM and others; of Magistral; of Seed-OSS."""
_MAX_LINES = 8
"""Most line feeds at either end of a reasoning, and after it, that belong to the format."""


class Thinking:
    """Reads the reasoning. What follows goes to another reader, or is text."""

    def __init__(self, pair: tuple[str, str], then: Reader | None, *, is_inside: bool, is_beginning: bool) -> None:
        """`is_inside`: the prompt ends with the first mark. `is_beginning`: the answer may begin with it."""
        self._open, self._close = pair
        self._end = Marks(self._close)
        self._then = then
        self._rest = ""
        self._state = "first" if is_beginning else "after"
        if is_inside:
            self._state = "begun"

    @property
    def is_reasoning(self) -> bool:
        """See Reader."""
        return self._state in ("begun", "inside")

    def push(self, text: str) -> list[Event]:
        """See Reader."""
        if self._state == "after":
            return self._pass(text)
        self._rest += text
        return self._run(False)

    def finish(self) -> list[Event]:
        """See Reader."""
        events = self._run(True)
        return events + (self._then.finish() if self._then is not None else [])

    def _run(self, ended: bool) -> list[Event]:
        events: list[Event] = []
        if self._state == "first" and not self._first(ended):
            return events
        if self._state == "begun" and not self._begun(ended):
            return events
        if self._state == "inside":
            events += self._inside(ended)
        if self._state == "ended" and not self._ended(ended):
            return events
        if self._state == "after":
            text, self._rest = self._rest, ""
            events += self._pass(text)
        return events

    def _first(self, ended: bool) -> bool:
        at = blank_end(self._rest)
        rest = self._rest[at:]
        if at <= MAX_BLANK and not ended and self._open.startswith(rest) and rest != self._open:
            return False
        if at <= MAX_BLANK and rest.startswith(self._open):
            self._rest = rest[len(self._open) :]
            self._state = "begun"
        else:
            self._state = "after"
        return True

    def _begun(self, ended: bool) -> bool:
        return self._without_lines("inside", ended)

    def _ended(self, ended: bool) -> bool:
        return self._without_lines("after", ended)

    def _without_lines(self, then: str, ended: bool) -> bool:
        """Leave out the line feeds that come next, and go on with the state `then`."""
        lines = len(self._rest) - len(self._rest.lstrip("\n"))
        if lines == len(self._rest) < _MAX_LINES and not ended:
            return False
        self._rest = self._rest[min(lines, _MAX_LINES) :]
        self._state = then
        return True

    def _inside(self, ended: bool) -> list[Event]:
        at, mark = self._end.find(self._rest)
        if ended and not mark:
            at = len(self._rest)
        said = self._rest[:at]
        lines = min(_MAX_LINES, len(said) - len(said.rstrip("\n")))
        kept = at if ended and not mark else at - lines
        events: list[Event] = [Reasoning(said[:kept])] if kept else []
        if mark:
            self._rest = self._rest[at + len(mark) :]
            self._state = "ended"
        else:
            self._rest = self._rest[kept:]
        return events

    def _pass(self, text: str) -> list[Event]:
        if self._then is not None:
            return self._then.push(text)
        return [Text(text)] if text else []
