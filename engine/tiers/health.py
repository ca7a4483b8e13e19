"""Says in the log that a tier's medium fails or hangs: once when it begins, and once when it is over."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from engine.tiers.copies.base import Direction
from engine.tiers.stores.place import DECLINED, Place

log = logging.getLogger(__name__)
HANG_S = 30.0
"""A tier hangs if copies are open and none ends for this time. The slowest copies take a second."""
QUIET_S = 60.0
"""A tier works again when a copy succeeds this long after the last failure. A medium that fails now and then so writes
two lines a minute at most."""
_DOING = {Direction.DEMOTE: "written", Direction.PROMOTE: "read"}


class TierHealth:
    """What is known of one tier's medium. `clock` returns seconds."""

    def __init__(self, tier: Place, clock: Callable[[], float]) -> None:
        self._tier = tier
        self._name = tier.name.lower()
        self._clock = clock
        self._failed_s: dict[Direction, float] = {}
        """Directions that fail, with the time of the last failure."""
        self._waiting_s: float | None = None
        """When copies were first seen open after the last one ended; None: not yet."""
        self._hangs = False

    def ended(self, direction: Direction, error: str | None, *, moved: bool) -> None:
        """Note the end of a copy. `moved`: whether any block arrived."""
        now_s = self._clock()
        self._waiting_s = None
        if self._hangs:
            self._hangs = False
            log.warning("%s tier: it answers again", self._name)
        if error is not None:
            if error.startswith(DECLINED) or self._is_gone(direction, error):
                return
            if direction not in self._failed_s:
                log.error(
                    "%s tier: blocks cannot be %s: %s; requests go on without it",
                    self._name,
                    _DOING[direction],
                    error,
                )
            self._failed_s[direction] = now_s
        elif moved and now_s - self._failed_s.get(direction, math.inf) >= QUIET_S:
            del self._failed_s[direction]
            log.warning("%s tier: blocks can be %s again", self._name, _DOING[direction])

    def check(self, *, is_busy: bool) -> None:
        """Say so if copies are open and none has ended for a long time."""
        now_s = self._clock()
        if not is_busy:
            self._waiting_s = None
        elif self._waiting_s is None:
            self._waiting_s = now_s
        elif now_s - self._waiting_s >= HANG_S and not self._hangs:
            self._hangs = True
            log.error("%s tier: it hangs: no copy has ended for %.0f s; requests go on without it", self._name, HANG_S)

    def _is_gone(self, direction: Direction, error: str) -> bool:
        """Return whether another engine has removed the block from the shared folder, as it may."""
        return self._tier is Place.SHARED and direction is Direction.PROMOTE and error.startswith("FileNotFoundError")
