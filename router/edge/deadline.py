"""A cheap `asyncio.timeout` for streams: without coroutines, and without a lookup of the running loop at each step."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class Deadline:
    """Cancels what its block awaits at the time set with `at`, and raises TimeoutError then.

    Any other cancellation of the task passes through, even if it comes together with the deadline. On Python 3.11 a
    lookup of the running loop is a system call, and asyncio.timeout makes one at each step.
    """

    __slots__ = ("_cancelling", "_is_over", "_loop", "_task", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """`loop`: the running loop. No deadline is set at first."""
        self._loop = loop
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._cancelling = 0
        self._is_over = False

    def at(self, time_s: float) -> None:
        """Set a new deadline, on the loop's clock. Has no effect once a deadline has passed."""
        if self._is_over:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(time_s, self._expire)

    def _expire(self) -> None:
        assert self._task is not None
        self._is_over = True
        self._task.cancel()

    def __enter__(self) -> Self:
        self._task = asyncio.current_task(self._loop)
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        task, self._task = self._task, None
        if self._is_over and task is not None and task.uncancel() <= self._cancelling and _is_cancelled(kind):
            raise TimeoutError from error


def _is_cancelled(kind: type[BaseException] | None) -> bool:
    return kind is not None and issubclass(kind, asyncio.CancelledError)
