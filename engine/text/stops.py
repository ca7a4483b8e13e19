"""Finds stop strings in a stream of text whose pieces can end anywhere."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on until a stop string is complete, and holds back text that may become one.

    The stop string that is complete first counts; if several are complete at once, the longest counts. So the outcome
    does not depend on where the pieces end.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._beginnings = [_Beginning(stop) for stop in stops]
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def push(self, piece: str) -> tuple[str, bool]:
        """Return (text to pass on, whether a stop string ended it). Push nothing after the end."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            end, start = min(found)
            self.found = text[start:end]
            return text[:start], True
        keep = max(beginning.after(piece) for beginning in self._beginnings)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """Return the text held back, if the text ends without a stop string."""
        held, self._held = self._held, ""
        return held


class _Beginning:
    """The longest end of a text that is a beginning of one stop string. It costs the same for each character of the
    text, whatever the stop string is (Knuth, Morris and Pratt)."""

    __slots__ = ("_borders", "_length", "_stop")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._length = 0
        self._borders = [0, 0]
        """For each length up to the longest one reached: the longest shorter beginning with which this one ends."""

    def after(self, piece: str) -> int:
        """Return the length after a further piece of the text, which does not complete the stop string."""
        stop, borders, length = self._stop, self._borders, self._length
        for char in piece:
            while length and stop[length] != char:
                length = borders[length]
            if stop[length] == char:
                length += 1
                if length == len(borders):
                    borders.append(self._longer(borders[-1], stop[length - 1]))
        self._length = length
        return length

    def _longer(self, border: int, char: str) -> int:
        """Return the border of the beginning that is longer by `char` than the one with this border."""
        while border and self._stop[border] != char:
            border = self._borders[border]
        return border + (self._stop[border] == char)
