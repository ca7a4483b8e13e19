"""How many requests are inside, how many may be, and when none is left."""

from __future__ import annotations

import asyncio

from engine.contract.errors import TooManyRequests
from router.gateway.inbound import RETRY_AFTER_S


class Admission:
    """`with admission:` counts one request in and out. Raises TooManyRequests at the bound."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._idle = asyncio.Event()
        self._idle.set()
        self.in_flight = 0
        self.is_draining = False
        """Set on shutdown: readiness says no, requests that still arrive are served."""

    def __enter__(self) -> None:
        if self.in_flight >= self._max_in_flight:
            raise TooManyRequests(
                f"{self._max_in_flight} requests are in flight already", code="overloaded", retry_after_s=RETRY_AFTER_S
            )
        self.in_flight += 1
        self._idle.clear()

    def __exit__(self, *exc: object) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Until no request is inside."""
        await self._idle.wait()
