"""The arguments of a call as a JSON object, which pass as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.text.calls.json_scan import JsonScan
from engine.text.calls.machine import Machine


class JsonArguments(Machine):
    """Reads such arguments, for formats that write them."""

    def __init__(self, marks: Sequence[str], *, is_beginning: bool = True) -> None:
        """See Machine."""
        super().__init__(marks, is_beginning=is_beginning)
        self._scan = JsonScan()
        self._after_arguments: Callable[[bool], bool] = self._text

    def _begin_arguments(self, name: str, length: int, then: Callable[[bool], bool]) -> None:
        """A call begins, and its arguments after the next `length` characters. `then`: the state after them."""
        self._start_call(name, length)
        self._scan = JsonScan()
        self._after_arguments = then
        self._state = self._arguments

    def _arguments(self, ended: bool) -> bool:
        end = self._scan.end(self._rest)
        if end < 0:
            self._argue(self._rest)
            self._rest = ""
            return False
        self._argue(self._rest[:end])
        self._end_call()
        self._rest = self._rest[end:]
        self._state = self._after_arguments
        return True
