"""The next step in the search for the knee: the highest step that a server still keeps up with. No I/O, no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_HALVINGS = 6
"""How often the first step is halved if it already saturates."""


@dataclass(slots=True)
class Search:
    """Doubles from `start` to the first saturated step. Then it halves the gap between the last good and the first bad
    step, on a logarithmic scale, until they are within `precision` of each other. With `steps`, it tries only those, up
    to the first saturated one."""

    start: float
    precision: float = 0.1
    """Relative width of the gap at which the search ends."""
    steps: Sequence[float] = ()
    is_whole: bool = False
    """Steps are whole numbers (concurrent requests)."""
    most: float = math.inf
    """The highest step that may be tried."""
    tried: dict[float, bool] = field(default_factory=dict)
    """Step -> whether it was saturated."""

    @property
    def good(self) -> float | None:
        """Return the highest step below every saturated one; None: there is none."""
        bad = self.bad
        return max(
            (s for s, saturated in self.tried.items() if not saturated and (bad is None or s < bad)), default=None
        )

    @property
    def bad(self) -> float | None:
        """Return the lowest saturated step; None: none was saturated."""
        return min((step for step, saturated in self.tried.items() if saturated), default=None)

    def add(self, step: float, *, saturated: bool) -> None:
        """Note the outcome of a step."""
        self.tried[step] = saturated

    def next(self) -> float | None:
        """Return the step to try; None: the knee is known, or cannot be known more closely."""
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
        # Four digits: a rate that a report can print and a user can type again.
        return None if bad <= good * (1 + self.precision) else float(f"{math.sqrt(good * bad):.4g}")
