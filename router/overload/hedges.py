"""How many requests may go to a second pod while the first is silent."""

from __future__ import annotations

HEDGED_ONE_IN = 50
"""Requests for each that is hedged: 2 % more, which Dean and Barroso (The Tail at Scale, 2013) found enough to cut the
tail. What was saved up is one hedge at most, so a fleet that is slow all over is not sent a burst of them."""


class HedgeBudget:
    """One hedge for every HEDGED_ONE_IN requests, none before that many came."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since = 0
        """Requests since the last hedge, as far as they count."""

    def saw(self) -> None:
        """One request more."""
        if self._since < HEDGED_ONE_IN:
            self._since += 1

    def take(self) -> bool:
        """One hedge more. False: it may not be."""
        if self._since < HEDGED_ONE_IN:
            return False
        self._since = 0
        return True
