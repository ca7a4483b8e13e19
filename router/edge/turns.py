"""Long work in pieces: at most one piece in a pass of the event loop, whoever it is for.

A short request takes several passes. If each of many connections did a piece of its work in each pass, the short
request would wait for all of them every time. After a piece, the others have the event loop for as long as the piece
took.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

TICK_S = 1e-3
"""The event loop's timers count in milliseconds."""


class Turns:
    """Work that waits. Each piece should take less than a millisecond."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_running = False
        self._began_s = self._owed_s = 0.0

    def add(self, work: Callable[[], None]) -> None:
        """Call `work` in a later pass, after what was added before. Whoever adds again and again takes turns with the
        others."""
        self._waiting.append(work)
        if not self._is_running:
            self._is_running = True
            asyncio.get_running_loop().call_soon(self._begin)

    async def turn(self) -> None:
        """Wait for a turn. The work until the next wait is the piece."""
        turn = asyncio.get_running_loop().create_future()
        self.add(lambda: None if turn.done() else turn.set_result(None))
        await turn

    def _begin(self) -> None:
        """Begin a piece. If it wakes a task, that runs before `_end`."""
        self._began_s = time.perf_counter()
        try:
            self._waiting.popleft()()
        finally:
            asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        self._owed_s += time.perf_counter() - self._began_s
        loop = asyncio.get_running_loop()
        if not self._waiting:
            self._is_running = False
        elif self._owed_s < TICK_S:
            loop.call_soon(self._begin)
        else:
            loop.call_later(self._owed_s, self._begin)
            self._owed_s = 0.0
