"""One engine of discovery, with what is known of it."""

from __future__ import annotations

import asyncio

from router.fleet.discovery import EngineAddress
from router.fleet.faults import Standing
from router.fleet.pod import Pod


class Member:
    """One engine of discovery, with what is known of it."""

    __slots__ = (
        "address",
        "admitted",
        "asked",
        "failures",
        "last_error",
        "pod",
        "probed_at_s",
        "task",
        "wake",
    )

    def __init__(self, address: EngineAddress) -> None:
        self.address = address
        self.pod: Pod | None = None
        self.admitted = False
        """The probe says that it answers. Requests need discovery's word too: `answers`."""
        self.failures = 0
        self.last_error: str | None = None
        self.probed_at_s = 0.0
        """When the last probe had its answer, or got none."""
        self.asked = False
        """Whether a probe is wanted at once."""
        self.wake = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def ask(self) -> None:
        """Have it probed at once."""
        self.asked = True
        self.wake.set()

    @property
    def url(self) -> str:
        """The engine's base URL."""
        return self.address.url

    @property
    def answers(self) -> bool:
        """Whether both the probe and discovery say so."""
        return self.admitted and self.address.is_ready

    @property
    def takes_requests(self) -> bool:
        """Whether it answers, is not ejected for failing requests, and does not leave."""
        return self.answers and self.pod is not None and self.pod.faults.standing is Standing.IN
