"""Count and bound the requests in flight and the bytes of bodies and answers that the gateway keeps for them."""

from __future__ import annotations

import asyncio
from typing import Self

from engine.contract.errors import TooManyRequests
from router.edge.errors import RETRY_AFTER_S

MIB = 2**20


class Admission:
    """`with admission.request() as admitted:` counts one request and the bytes that `admitted` holds."""

    def __init__(self, max_in_flight: int, max_body_bytes: int, max_answer_bytes: int) -> None:
        """The bounds in bytes are for all requests in flight together."""
        self._max_in_flight = max_in_flight
        self._max_body_bytes = max_body_bytes
        self._max_answer_bytes = max_answer_bytes
        self._idle = asyncio.Event()
        self._idle.set()
        self.in_flight = 0
        self.body_bytes = 0
        self.answer_bytes = 0
        self.is_draining = False
        """Set on shutdown: readiness fails, but requests that still arrive are served."""

    def request(self) -> Admitted:
        """Return a context manager that counts one request while its block lasts."""
        return Admitted(self)

    def enter(self) -> None:
        """Count one more request. Raises TooManyRequests at the bound."""
        if self.in_flight >= self._max_in_flight:
            raise _overloaded(f"{self._max_in_flight} requests are in flight already")
        if not self.in_flight:
            self._idle.clear()
        self.in_flight += 1

    def reserve(self, body_bytes: int) -> None:
        """Reserve `body_bytes` more bytes. Raises TooManyRequests if they do not fit."""
        if self.body_bytes + body_bytes > self._max_body_bytes:
            taken, bound = self.body_bytes / MIB, self._max_body_bytes / MIB
            raise _overloaded(f"this body does not fit: bodies of requests in flight take {taken:.1f} of {bound:g} MiB")
        self.body_bytes += body_bytes

    def keep(self, answer_bytes: int) -> bool:
        """Reserve `answer_bytes` more bytes of an answer. Return False if they do not fit."""
        if self.answer_bytes + answer_bytes > self._max_answer_bytes:
            return False
        self.answer_bytes += answer_bytes
        return True

    def leave(self, body_bytes: int, answer_bytes: int) -> None:
        """Count one request less, and release the bytes that it reserved."""
        self.in_flight -= 1
        self.body_bytes -= body_bytes
        self.answer_bytes -= answer_bytes
        if not self.in_flight:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()


class Admitted:
    """One request, counted while its block lasts. Entering raises TooManyRequests at the bound."""

    __slots__ = ("_admission", "_answer_bytes", "_body_bytes")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._body_bytes = 0
        self._answer_bytes = 0

    def __enter__(self) -> Self:
        self._admission.enter()
        return self

    def __exit__(self, *exc: object) -> None:
        self._admission.leave(self._body_bytes, self._answer_bytes)

    def hold(self, body_bytes: int) -> None:
        """Count the body as at least `body_bytes`, until the block ends. Raises TooManyRequests at the bound."""
        more = body_bytes - self._body_bytes
        if more > 0:
            self._admission.reserve(more)
            self._body_bytes = body_bytes

    def keep(self, answer_bytes: int) -> bool:
        """Count `answer_bytes` more, until `let_go` or the end of the block. Return False if they do not fit."""
        if not self._admission.keep(answer_bytes):
            return False
        self._answer_bytes += answer_bytes
        return True

    def forget_body(self) -> None:
        """Release the bytes of the body, which is gone."""
        self._admission.body_bytes -= self._body_bytes
        self._body_bytes = 0

    def let_go(self) -> None:
        """Release the bytes of the answers that were kept."""
        self._admission.answer_bytes -= self._answer_bytes
        self._answer_bytes = 0


def _overloaded(text: str) -> TooManyRequests:
    return TooManyRequests(text, code="overloaded", retry_after_s=RETRY_AFTER_S)
