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
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """Return the text held back, if the text ends without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
