"""How often an engine's metrics are read: so rarely that reading never makes a busy engine busier. Pure.

The process that takes an engine's requests also makes the page, so reading costs it time. The pause is at least
`SPARING` times as long as the last page took: a gateway uses at most 1/50 of that process. If many gateways read, or
the engine is busy, pages take longer, and all gateways read less often.
"""

from __future__ import annotations

import math

from engine.contract.periods import LARGEST_FLEET, SMALL_FLEET

PERIOD_S = 1.0
"""Seconds, in a fleet of up to `SMALL_FLEET` engines."""
LONGEST_PERIOD_S = 5.0
"""Seconds, in the largest fleets: a reading counts for 10 s at most (`router.views.reported`)."""
SPARING = 50.0
LONGEST_PAUSE_S = 60.0
SLOW = 2.0
"""If the pause exceeds this many periods to spare the engine, `problem` says so."""


def period_s(pods: int) -> float:
    """Return the seconds between two readings of one engine. As in `engine.contract.periods`: a fleet 16 times as
    large is read four times as often in total, and each of its engines a quarter as often."""
    width = math.sqrt(max(1.0, min(pods, LARGEST_FLEET) / SMALL_FLEET))
    return min(LONGEST_PERIOD_S, PERIOD_S * width)


class Pace:
    """The pace for one engine. `problem`: why it is read less often than others, or not at all; None: it is read as
    usual."""

    __slots__ = ("pause_s", "problem")

    def __init__(self) -> None:
        self.pause_s = 0.0
        """Seconds until the next reading, before jitter."""
        self.problem: str | None = None

    def read(self, took_s: float, pods: int) -> None:
        """Note that a page came `took_s` after the request."""
        usual_s = period_s(pods)
        self.pause_s = min(LONGEST_PAUSE_S, max(usual_s, SPARING * took_s))
        is_slow = self.pause_s > SLOW * usual_s
        self.problem = f"its pages take {took_s:.2g} s: read every {self.pause_s:.2g} s" if is_slow else None

    def failed(self, problem: str, pods: int) -> None:
        """Note that no page came in time. Each further failure doubles the pause."""
        self.pause_s = min(LONGEST_PAUSE_S, 2 * max(self.pause_s, period_s(pods)))
        self.problem = problem

    def hopeless(self, problem: str) -> None:
        """Note that there is no page, or no useful one."""
        self.pause_s = LONGEST_PAUSE_S
        self.problem = problem
