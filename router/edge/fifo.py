"""Process a few requests at a time, first come, first served, from their first byte until they go to an engine.

Otherwise all requests of a burst would pass each stage together, and the first would be sent only after the last is
read. So the gateway reads a client's data only if its connection has a place in the fifo. A place is for work of this
process: a request that waits for anything else (the rest of a body, a connection, a pod with room) gives it back first.

If more requests come than this process can pass on, the line stands, and every request would become late. Then those
that have waited for LONGEST_WAIT_S are refused, so that the others are in time.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import Protocol

from router.overload.standing import Goal, Standing

PLACES = 4
"""With one place, the event loop would idle for a turn at each step of a request. 4 and 16 gave the same mean TTFT."""
MAX_WAITING_BYTES = 32 * 2**20
"""Most bytes of all waiters. One beyond this enters without a free place, and only admission bounds it."""
MAX_HOLD_S = 0.1
"""After this time a place goes to the next waiter, so a place that is never given back stops nobody."""


GOAL = Goal(2.0, 0.0)
"""The line stands if for 4 s no request waited less than 1 s (see Standing): a burst of that length is served whole."""
LONGEST_WAIT_S = 1.25
"""While the line stands, a request that has waited so long is refused. It is above 1 s, so that the line still stands
while requests are refused."""


class Waiter(Protocol):
    """A connection that has brought bytes."""

    def turn_away(self) -> bool:
        """Refuse the request that waits. Return False if it is none that can be refused; then it waits on."""
        ...

    def take_turn(self) -> None:
        """Take the place that is now this waiter's, until it leaves or has had it for MAX_HOLD_S."""
        ...


class Fifo:
    """The connections that have a place, and those that wait for one."""

    def __init__(self, places: int = PLACES, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._places = places
        self._max_waiting_bytes = max_waiting_bytes
        self._inside: dict[Waiter, float] = {}
        """Connections with a place, and since when, in seconds of the monotonic clock."""
        self._waiting: OrderedDict[Waiter, tuple[int, float]] = OrderedDict()
        """Bytes of each waiter, and since when it waits, in order of arrival."""
        self._standing = Standing()
        self._waiting_bytes = 0
        self._is_filling = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Number of connections that wait."""
        return len(self._waiting)

    def enter(self, waiter: Waiter, size: int) -> bool:
        """Return whether the waiter has a place at once. If not, it waits with its `size` bytes for `take_turn`."""
        now_s = time.monotonic()
        if waiter in self._inside or (len(self._inside) < self._places and not self._waiting):
            self._inside[waiter] = now_s
            return True
        if self._standing.lasts(GOAL, now_s):
            while self._waiting and self._waiting_bytes + size > self._max_waiting_bytes:
                self._next(now_s, is_late=True)
        if self._waiting_bytes + size > self._max_waiting_bytes:
            self._inside[waiter] = now_s
            return True
        self._waiting[waiter] = (size, now_s)
        self._waiting_bytes += size
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(MAX_HOLD_S, self._look)
        return False

    def leave(self, waiter: Waiter) -> None:
        """Free the waiter's place, or take it off the queue."""
        if self._inside.pop(waiter, None) is None:
            self._waiting_bytes -= self._waiting.pop(waiter, (0, 0.0))[0]
        if self._waiting:
            self._fill()

    def _fill(self) -> None:
        if self._is_filling:  # called by a waiter that leaves as soon as it is inside
            return
        self._is_filling = True
        try:
            while self._waiting and len(self._inside) < self._places:
                self._next(time.monotonic())
            if not self._waiting:
                self._standing.emptied()
        finally:
            self._is_filling = False

    def _next(self, now_s: float, *, is_late: bool = False) -> None:
        """Take the first waiter off the queue. Give it a place, or turn it away if it is late and the line stands."""
        waiter, (size, since_s) = self._waiting.popitem(last=False)
        self._waiting_bytes -= size
        self._standing.left(now_s - since_s, GOAL, now_s)
        is_late = is_late or now_s - since_s >= LONGEST_WAIT_S
        if not (is_late and self._standing.lasts(GOAL, now_s) and waiter.turn_away()):
            self._inside[waiter] = now_s
            waiter.take_turn()

    def _look(self) -> None:
        """Take back places that are held for too long."""
        self._timer = None
        latest_s = time.monotonic() - MAX_HOLD_S
        for waiter in [waiter for waiter, since_s in self._inside.items() if since_s <= latest_s]:
            del self._inside[waiter]
        self._fill()
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(MAX_HOLD_S, self._look)
