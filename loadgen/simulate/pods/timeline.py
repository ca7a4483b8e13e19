"""Virtual time: future actions in order."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Timeline:
    """Actions at times. Of two actions at the same time, the one added first comes first, so a run is deterministic."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Action]] = []
        self._count = 0

    def at(self, when_s: float, action: Action) -> None:
        """Do `action` at `when_s`, or now if that time is past."""
        self._count += 1
        heapq.heappush(self._queue, (max(when_s, self.now_s), self._count, action))

    def after(self, delay_s: float, action: Action) -> None:
        """Do `action` in `delay_s`."""
        self.at(self.now_s + delay_s, action)

    def clock(self) -> float:
        """Return the current time; pass this method as a clock."""
        return self.now_s

    def step(self) -> bool:
        """Do the next action; False if none is left."""
        if not self._queue:
            return False
        self.now_s, _, action = heapq.heappop(self._queue)
        action()
        return True
