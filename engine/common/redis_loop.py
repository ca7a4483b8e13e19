"""The outermost loop of each exchange with Redis: it keeps trying while Redis is away, and logs each outage once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

from engine.common.redis_client import REDIS_ERRORS, raise_if_cancelled

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 0.5
_ERRORS_LOGGED = 8


class Outage:
    """What one exchange knows of Redis: whether it answers, how often it failed, and what was logged of that.

    Each different error of an outage is logged once, because an outage may begin with one error and go on with another,
    such as a wrong password.
    """

    def __init__(self, log: logging.Logger, subject: str, meanwhile: str, *, level: int = logging.WARNING) -> None:
        """An error of Redis is logged as `SUBJECT: Redis: ERROR; MEANWHILE`."""
        self._log = log
        self._subject = subject
        self._meanwhile = meanwhile
        self._level = level
        self._logged: set[str] = set()
        self.is_connected = False
        self.failures = 0
        """Times that Redis failed, since the start."""
        self.last_error: str | None = None
        """The error of the present outage."""

    def succeeded(self) -> None:
        """Note that Redis works."""
        if not self.is_connected:
            self._log.log(min(self._level, logging.INFO), "%s: Redis answers", self._subject)
            self.is_connected, self.last_error = True, None
            self._logged.clear()

    def failed(self, error: BaseException) -> None:
        """Note that Redis, or the work with it, failed. After _ERRORS_LOGGED different errors no error is logged. The
        log shows where the error came from if it is a defect of this program."""
        self.is_connected = False
        self.failures += 1
        defect = None if isinstance(error, REDIS_ERRORS) else error
        text = str(error) or type(error).__name__
        self.last_error = f"Redis: {text}" if defect is None else text
        if text not in self._logged and len(self._logged) < _ERRORS_LOGGED:
            self._logged.add(text)
            self._log.log(self._level, "%s: %s; %s", self._subject, self.last_error, self._meanwhile, exc_info=defect)


async def keep_trying(
    work: Callable[[], Awaitable[None]],
    outage: Outage,
    reset: Callable[[], Awaitable[None]],
    *,
    longest_pause_s: float | None = None,
) -> NoReturn:
    """Repeat `work` until cancelled, whatever it raises. After an error, call `reset` and pause: twice as long each
    time, at most `longest_pause_s`.

    `work` calls `outage.succeeded` once Redis has answered. `reset` drops the connections, and raises nothing.
    """
    pause_s = FIRST_PAUSE_S
    while True:
        raise_if_cancelled()
        try:
            await work()
        except Exception as error:  # one defect must not end the exchange for good
            if outage.is_connected:
                pause_s = FIRST_PAUSE_S
            outage.failed(error)
            await reset()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S if longest_pause_s is None else longest_pause_s)
