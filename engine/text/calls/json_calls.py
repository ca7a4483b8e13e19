"""Calls as JSON objects, `{"name": "f", "arguments": {...}}`, which several formats put between their own marks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence

from engine.text.calls.json_arguments import JsonArguments
from engine.text.calls.json_scan import JsonScan, members
from engine.text.calls.machine import MAX_BLANK, MAX_HEAD, MAX_HELD, blank_end

_STRING = r'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(
    rf'\s*\{{\s*(?:"(?:type|id)"\s*:\s*{_STRING}\s*,\s*)*"name"\s*:\s*({_STRING})\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)
_FIRST_KEY = re.compile(r'\s*\{\s*(?:"(?:[^"\\]|\\.)*"|[^"\s])', re.DOTALL)
_KEYS = frozenset(("name", "arguments", "parameters", "type", "id"))
_MORE = re.compile(rf'(?:,\s*"\w+"\s*:\s*(?:{_STRING}|[\w.+-]+)\s*)+\}}', re.DOTALL)
"""What may follow the arguments in the object, such as an id."""
_MOST_MORE = 256


class JsonCalls(JsonArguments):
    """Reads such objects. The name comes first nearly always; then the arguments pass as they come. Otherwise the whole
    object is held back."""

    def __init__(
        self, marks: Sequence[str], *, is_beginning: bool = True, names: Collection[str] | None = None
    ) -> None:
        """`names`: only calls of these functions are calls. None: any."""
        super().__init__(marks, is_beginning=is_beginning)
        self._names = names
        self._scanned = 0
        self._next: Callable[[bool], bool] = self._text

    def _begin_object(self, then: Callable[[bool], bool]) -> None:
        """An object begins after white space. `then`: the state after it."""
        self._next = then
        self._scan, self._scanned = JsonScan(is_strict=True), 0
        self._state = self._object

    def _object(self, ended: bool) -> bool:
        rest, at = self._rest, blank_end(self._rest)
        if at > MAX_BLANK or (at < len(rest) and rest[at] != "{"):
            return self._give_up(0)
        if at < len(rest):
            if self._scanned < MAX_HEAD:
                head = rest[:MAX_HEAD]
                if (found := _HEAD.match(head)) is not None:
                    return self._head(found)
                if (first := _FIRST_KEY.match(head)) is not None and not _is_known(first[0].lstrip()[1:].lstrip()):
                    return self._give_up(first.end())
            end = self._scan.end(rest, max(self._scanned, at))
            self._scanned = len(rest)
            if 0 <= end <= MAX_HELD:
                return self._give_up(end) if self._scan.is_foreign else self._whole(end)
            if len(rest) >= MAX_HELD:
                return self._give_up(MAX_HELD)
        if not ended:
            return False
        self._give_up(len(rest))
        return False

    def _head(self, found: re.Match[str]) -> bool:
        name = _text_of(found[1])
        if not self._is_name(name):
            return self._give_up(found.end())
        self._begin_arguments(name, found.end(), self._rest_of_object)
        return True

    def _is_name(self, name: str) -> bool:
        return bool(name) and (self._names is None or name in self._names)

    def _whole(self, end: int) -> bool:
        """Read an object that is complete."""
        try:
            given = dict(members(self._rest[:end]))
            name = _text_of(given.get("name", '""'))
            arguments = next((given[key] for key in ("arguments", "parameters") if key in given), "{}")
            if arguments.startswith('"'):  # an object as a text
                arguments = _text_of(arguments).strip()
        except ValueError:
            return self._give_up(end)
        if arguments == "null":
            arguments = "{}"
        if not self._is_name(name) or not arguments.startswith("{"):
            return self._give_up(end)
        self._start_call(name, end)
        self._argue(arguments)
        self._end_call()
        self._state = self._next
        return True

    def _rest_of_object(self, ended: bool) -> bool:
        at = self._after_blank(ended)
        if at is None:
            return False
        if at >= 0 and self._rest[at] == "}":
            self._rest = self._rest[at + 1 :]
        elif at >= 0 and self._rest[at] == ",":
            rest = self._rest[: at + _MOST_MORE]
            if (found := _MORE.match(rest, at)) is not None:
                self._rest = self._rest[found.end() :]
            elif len(self._rest) < at + _MOST_MORE and not ended:
                return False
        self._state = self._next
        return True


def _is_known(first: str) -> bool:
    """Return whether an object's first key, or what stands in its place, may begin a call."""
    return first.startswith('"') and _text_of(first, lenient=True) in _KEYS


def _text_of(string: str, *, lenient: bool = False) -> str:
    """Return the text of a JSON string. Raises ValueError, unless lenient: then it is empty."""
    try:
        text = json.loads(string, strict=False)
    except ValueError:
        if lenient:
            return ""
        raise
    if not isinstance(text, str):
        raise ValueError("no string")
    return text
