"""How many requests may go to a second pod while the first is silent."""

from __future__ import annotations

HEDGED_ONE_IN = 50
"""One hedge per this many requests: 2 % more, which Dean and Barroso (The Tail at Scale, 2013) found enough to cut the
tail. At most one unused hedge is saved up, so that a slow fleet does not get a burst of them."""


class HedgeBudget:
    """Allows one hedge for every HEDGED_ONE_IN requests, and none before that many came."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since = 0
        """Requests since the last hedge, up to the number that counts."""

    def saw(self) -> None:
        """Count one more request."""
        if self._since < HEDGED_ONE_IN:
            self._since += 1

    def take(self) -> bool:
        """Take one hedge. False: none is allowed."""
        if self._since < HEDGED_ONE_IN:
            return False
        self._since = 0
        return True
