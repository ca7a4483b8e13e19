"""The clock that all times of a run are read from."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import uvloop


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """Seconds on the loop's clock. uvloop reads its own in milliseconds and once a turn: here at full resolution."""
    return time.monotonic if isinstance(loop, uvloop.Loop) else loop.time
