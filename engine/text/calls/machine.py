"""What the readers of all formats share: text that comes in pieces, marks in it, and the rules for white space.

A reader is a machine whose state is a method. The method takes what it can from `_rest`, appends events, and returns
whether it got on. So the events do not depend on where the pieces end.

A reader holds text back only where a mark may be complete, or where a call may begin, and never more than `MAX_HELD`
characters. Each character is looked at a bounded number of times.

White space between a text and a call, or between two calls, belongs to the format: templates add it again when the
conversation goes on. All other text reaches the client.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.text.calls.events import Arguments, CallEnd, CallStart, Event, Text

MAX_HELD = 16_384
"""Most characters of a call that wait for the name of its function."""
MAX_BLANK = 64
"""Most characters of white space that may belong to a format. More is text."""
MAX_HEAD = 512
"""Most characters in which a format says that a call begins and which function it calls."""


class Reader(Protocol):
    """Turns an answer's text into events."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within the reasoning."""

    def push(self, text: str) -> list[Event]:
        """Return the events that a further piece makes certain."""

    def finish(self) -> list[Event]:
        """Return the rest. Push nothing afterwards."""


class Marks:
    """Finds the first of several marks in a text that goes on. No mark may be within another one."""

    def __init__(self, *marks: str) -> None:
        self._whole = re.compile("|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True)))
        self._begun = re.compile(f"(?:{'|'.join(_beginnings(mark) for mark in marks)})\\Z")
        self._longest = max(map(len, marks))

    def find(self, text: str, at: int = 0) -> tuple[int, str]:
        """Return where the first mark at or after `at` begins, and the mark. Without one: where a mark may begin at the
        text's end, and an empty string."""
        found = self._whole.search(text, at)
        if found is None:
            found = self._begun.search(text, max(0, len(text) - self._longest + 1))
            return (len(text) if found is None else found.start()), ""
        return found.start(), found[0]


def _beginnings(mark: str) -> str:
    """Return the pattern of all beginnings of a mark."""
    pattern = ""
    for char in reversed(mark[:-1]):
        pattern = f"{re.escape(char)}(?:{pattern})?" if pattern else re.escape(char)
    return pattern or "(?!)"


def blank_end(text: str) -> int:
    """Return where the white space at the beginning of `text` ends."""
    return len(text) - len(text.lstrip())


class Machine:
    """A reader for calls. A format begins one in `_on_mark` or in a state of its own."""

    def __init__(self, marks: Sequence[str], *, is_beginning: bool = True) -> None:
        """`marks`: those with which calls begin. `is_beginning`: whether the text is the beginning of the content."""
        self._marks = Marks(*marks)
        self._rest = ""
        self._events: list[Event] = []
        self._state: Callable[[bool], bool] = self._text
        self._blank = "kept" if is_beginning else ""
        """What becomes of white space now that no text follows: `kept` as text, or `dropped` after a call. It is
        dropped before a call. Empty: text has come, so white space is text."""
        self._syntax = ""
        """What was read of a call before its name; it becomes text if there is no call."""
        self._is_open = self._has_arguments = False

    @property
    def is_reasoning(self) -> bool:
        """See Reader."""
        return False

    def push(self, text: str) -> list[Event]:
        """See Reader."""
        self._rest += text
        return self._run(False)

    def finish(self) -> list[Event]:
        """See Reader."""
        events = self._run(True)
        if self._is_open:
            self._end_call()
            events += self._taken()
        return events

    def _run(self, ended: bool) -> list[Event]:
        while self._state(ended):
            pass
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _text(self, ended: bool) -> bool:
        """The state outside of calls."""
        at, mark = self._marks.find(self._rest)
        if ended and not mark:
            at = len(self._rest)
        before = self._rest[:at]
        if self._blank and len(before) <= MAX_BLANK and not before.strip():
            if not mark and not ended:
                return False
            if not mark and self._blank == "kept":
                self._say(before)
            self._syntax = before + mark
        else:
            self._say(before)
            self._syntax = mark
        self._rest = self._rest[at + len(mark) :]
        if not mark:
            return False
        self._on_mark(mark)
        return True

    def _on_mark(self, mark: str) -> None:
        """Set the state after a mark. `_syntax` has the mark."""
        raise NotImplementedError

    def _say(self, text: str) -> None:
        if text:
            self._events.append(Text(text))
            self._blank = ""

    def _skip(self, length: int) -> None:
        """Read syntax of the format."""
        self._syntax += self._rest[:length]
        self._rest = self._rest[length:]

    def _give_up(self, length: int) -> bool:
        """There is no call: what was read of one, and the next `length` characters, are text."""
        text, self._rest = self._syntax + self._rest[:length], self._rest[length:]
        self._syntax = ""
        self._say(text)
        self._state = self._text
        return True

    def _start_call(self, name: str, length: int) -> None:
        """A call begins after the next `length` characters."""
        self._rest, self._syntax = self._rest[length:], ""
        self._is_open, self._has_arguments = True, False
        self._events.append(CallStart(name))

    def _argue(self, text: str) -> None:
        if text:
            self._has_arguments = True
            self._events.append(Arguments(text))

    def _end_call(self) -> None:
        if not self._has_arguments:
            self._argue("{}")
        self._is_open = False
        self._blank = "dropped"
        self._events.append(CallEnd())

    def _after_blank(self, ended: bool) -> int | None:
        """Return where the next text after white space begins, -1 if there is none; None: wait for more."""
        at = blank_end(self._rest)
        if at > MAX_BLANK:
            return -1
        if at == len(self._rest):
            return -1 if ended else None
        return at

    def _leave(self, marks: Sequence[str], then: Callable[[bool], bool], ended: bool) -> bool:
        """Read one of the marks after white space, if one is there, and go on with the state `then`."""
        at = self._after_blank(ended)
        if at is None:
            return False
        if at >= 0:
            rest = self._rest[at:]
            for mark in marks:
                if rest.startswith(mark):
                    self._rest = rest[len(mark) :]
                    break
                if mark.startswith(rest) and not ended:
                    return False
        self._state = then
        return True
