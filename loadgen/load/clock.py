"""The clock for all times of a run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import uvloop


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """Return the loop's clock in seconds at full resolution; uvloop's own clock counts milliseconds and stands still
    within an iteration."""
    return time.monotonic if isinstance(loop, uvloop.Loop) else loop.time
