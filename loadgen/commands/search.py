"""Where to look next for the knee: the highest step that a server still keeps up with. No I/O, no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_HALVINGS = 6
"""How often the first step is halved where it saturates already."""


@dataclass(slots=True)
class Search:
    """Doubling from `start` to the first saturated step, then halving the gap between the last good and the first bad
    one, on a logarithmic scale, until they are within `precision` of each other. With `steps`, just those, up to the
    first saturated one."""

    start: float
    precision: float = 0.1
    """Relative width of the gap that is narrow enough."""
    steps: Sequence[float] = ()
    is_whole: bool = False
    """Steps are whole numbers (of requests at a time)."""
    most: float = math.inf
    """No step above it."""
    tried: dict[float, bool] = field(default_factory=dict)
    """Step -> whether it was saturated."""

    @property
    def good(self) -> float | None:
        """The highest step below every saturated one; None: there is none."""
        bad = self.bad
        return max(
            (s for s, saturated in self.tried.items() if not saturated and (bad is None or s < bad)), default=None
        )

    @property
    def bad(self) -> float | None:
        """The lowest saturated step; None: none was."""
        return min((step for step, saturated in self.tried.items() if saturated), default=None)

    def add(self, step: float, *, saturated: bool) -> None:
        """What became of a step."""
        self.tried[step] = saturated

    def next(self) -> float | None:
        """The step to try; None: the knee is known, or cannot be known more closely."""
        if self.steps:
            return next((step for step in self.steps if step not in self.tried), None) if self.bad is None else None
        step = self._next()
        return None if step is None or step in self.tried else step

    def _next(self) -> float | None:
        good, bad = self.good, self.bad
        if not self.tried:
            return min(self.start, self.most)
        if bad is None:
            assert good is not None
            return min(good * 2, self.most)
        if good is None:
            if len(self.tried) > MAX_HALVINGS or (self.is_whole and bad <= 1):
                return None
            return float(math.floor(bad / 2)) if self.is_whole else bad / 2
        if self.is_whole:
            return None if bad - good <= 1 or bad <= good * (1 + self.precision) else float((good + bad) // 2)
        # four digits: a rate that a report can print and a user can type again
        return None if bad <= good * (1 + self.precision) else float(f"{math.sqrt(good * bad):.4g}")
