"""How often an engine's metrics are read: seldom enough that the reading never makes a busy engine busier. Pure.

The page is made by the process that takes an engine's requests, and reading it takes from their time. So the pause is
at least `SPARING` times as long as the last page took to come: a gateway uses at most 1/50 of that process, and where
many gateways read, or the engine is busy, pages come later and all of them read less often.
"""

from __future__ import annotations

import math

from engine.contract.periods import LARGEST_FLEET, SMALL_FLEET

PERIOD_S = 1.0
"""In a fleet up to `SMALL_FLEET`."""
LONGEST_PERIOD_S = 5.0
"""In the largest fleets: what was read counts for 10 s at most (`router.routing.reported`)."""
SPARING = 50.0
LONGEST_PAUSE_S = 60.0
SLOW = 2.0
"""Times the period: a pause longer than that for the engine's sake is told to the operator."""


def period_s(pods: int) -> float:
    """Seconds between two readings of one of so many engines. As `engine.contract.periods`: a fleet 16 times as large
    is read four times as often in all, and each of its engines a quarter as often."""
    width = math.sqrt(max(1.0, min(pods, LARGEST_FLEET) / SMALL_FLEET))
    return min(LONGEST_PERIOD_S, PERIOD_S * width)


class Pace:
    """One engine's. `problem` says why it is read less often than others, or not at all; None: it is not."""

    __slots__ = ("pause_s", "problem")

    def __init__(self) -> None:
        self.pause_s = 0.0
        """Seconds until the next reading, before jitter."""
        self.problem: str | None = None

    def read(self, took_s: float, pods: int) -> None:
        """A page came, so many seconds after it was asked for."""
        usual_s = period_s(pods)
        self.pause_s = min(LONGEST_PAUSE_S, max(usual_s, SPARING * took_s))
        is_slow = self.pause_s > SLOW * usual_s
        self.problem = f"its pages take {took_s:.2g} s: read every {self.pause_s:.2g} s" if is_slow else None

    def failed(self, problem: str, pods: int) -> None:
        """None came in time. Each further time the pause doubles."""
        self.pause_s = min(LONGEST_PAUSE_S, 2 * max(self.pause_s, period_s(pods)))
        self.problem = problem

    def hopeless(self, problem: str) -> None:
        """There is none, or none that is of use."""
        self.pause_s = LONGEST_PAUSE_S
        self.problem = problem
