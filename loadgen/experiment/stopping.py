"""The number of rounds: until the interval is narrow enough, or the time or the maximum is reached."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_ROUNDS = 2
"""One round in each order (ABBA), so that a steady drift cancels, and so that the spread of rounds can be
distinguished from that of sessions."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """When to stop. `precision` is half the width of the interval of the mean TTFT's ratio, relative to the ratio."""

    precision: float
    max_rounds: int
    max_time_s: float
    rounds: int | None = None
    """Exactly this many rounds, at any precision, as far as `max_time_s` allows."""

    def reason(self, rounds: int, elapsed_s: float, half_width: float) -> str | None:
        """Return why no round follows the `rounds` that took `elapsed_s`; None: another round follows.

        The interval is examined only after an even number of rounds, because after an odd number it would include a
        drift.
        """
        if self.rounds is not None and rounds >= self.rounds:
            return f"the {counted_rounds(rounds)} asked for"
        if self.rounds is None and rounds >= self.max_rounds:
            return f"{counted_rounds(self.max_rounds)}, the most that --precision may take"
        if elapsed_s * (rounds + 1) / rounds > self.max_time_s:
            return f"another round would end after --max-time {self.max_time_s:g} s"
        if self.rounds is None and rounds >= LEAST_ROUNDS and rounds % 2 == 0 and half_width <= self.precision:
            return f"the interval is within {self.precision:.0%} of the ratio (--precision)"
        return None


def counted_rounds(count: int) -> str:
    """Return the number of rounds in words."""
    return "one round" if count == 1 else f"{count} rounds"
