"""Follows objects of the API server: a LIST, then WATCHes that continue from it, then a LIST again, for ever.

A watch alone is not enough: a removal that happens while the watch is down is never reported. So after any fault, and
every few minutes without one, the whole list replaces what was known. While the API server is not available, what was
known stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, Protocol

from router.fleet.discovery import DiscoveryStatus
from router.kubernetes.api import ApiError, ObjectApi, Trouble
from router.kubernetes.objects import Change, Object

log = logging.getLogger(__name__)

RELIST_EVERY_S = 300.0
WATCH_S = (30, 60)
"""How long a watch should last. Its end is the only sure sign that the server still talks to us."""
SHORT_WATCH_S = 5.0
"""A watch that ends sooner counts as a failure, so that a proxy that closes every stream is not asked in a tight
loop."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 5.0
"""Short, so that new objects are found soon after an outage; at worst each gateway makes one LIST in this time."""
SAY_AGAIN_S = 60.0


class Table(Protocol[Object]):
    """The known objects."""

    def replace(self, objects: Iterable[Object], /) -> None:
        """Take a complete LIST: objects that are not in it are gone."""

    def apply(self, change: Change[Object], /) -> None:
        """Take an event of a watch."""


class Watch(Generic[Object]):
    """The objects of one API. `connect` returns that API with fresh credentials; `table` is kept current.

    `where` begins each line of the log. `kept` is the text that says what stays while the API server cannot be
    followed.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[ObjectApi[Object]]],
        table: Table[Object],
        *,
        where: str,
        kept: str,
        rng: random.Random | None = None,
    ) -> None:
        self._connect = connect
        self._table = table
        self._where = where
        self._kept = kept
        self._rng = rng or random.Random()
        self._failures = 0
        self._synced_at_s: float | None = None
        self._watching_since_s: float | None = None
        """When the present watch began; None: there is none."""
        self._problem: ApiError | None = None
        self._said_at_s = -math.inf
        self._relists: Counter[str] = Counter()
        self._errors = 0

    def status(self) -> DiscoveryStatus:
        """Return the status. It is synced as of the last LIST, or of the end of the last watch that ran its full time.

        A problem is over when a watch has lasted for `SHORT_WATCH_S`.
        """
        began_s = self._watching_since_s
        is_followed = began_s is not None and asyncio.get_running_loop().time() - began_s >= SHORT_WATCH_S
        problem = None if self._problem is None or is_followed else f"{self._problem.trouble}: {self._problem}"
        return DiscoveryStatus(self._synced_at_s, problem, self._errors, dict(self._relists))

    async def changes(self) -> AsyncGenerator[None, None]:
        """Yield when the table may have changed. Never ends."""
        reason = "start"
        while True:
            try:
                self._relists[reason] += 1
                async with contextlib.aclosing(self._follow()) as changes:
                    async for _ in changes:
                        yield
                reason = "periodic"
            except ApiError as error:
                reason = await self._pause(error)
            except Exception as error:  # outermost loop: an unexpected error must not end discovery
                log.exception("%s", self._where)
                reason = await self._pause(ApiError(Trouble.MALFORMED, repr(error)))

    async def _follow(self) -> AsyncGenerator[None, None]:
        """Keep the table current from one LIST until the next is due; yield when it may have changed."""
        loop = asyncio.get_running_loop()
        async with self._connect() as api:
            objects, version = await api.list()
            self._table.replace(objects)
            self._synced_at_s = loop.time()
            yield
            relist_at = loop.time() + RELIST_EVERY_S
            while (left_s := relist_at - loop.time()) > 2 * SHORT_WATCH_S:
                began_at = self._watching_since_s = loop.time()
                try:
                    watching = api.watch(version, math.ceil(min(left_s, self._rng.uniform(*WATCH_S))))
                    async with contextlib.aclosing(watching) as events:
                        async for event in events:
                            version = _version_of(event)
                            if isinstance(event, Change):
                                self._table.apply(event)
                                yield
                    self._ended(loop.time() - began_at)
                finally:
                    self._watching_since_s = None
                    if loop.time() - began_at >= SHORT_WATCH_S:
                        self._failures = 0

    def _ended(self, lasted_s: float) -> None:
        if lasted_s < SHORT_WATCH_S:
            raise ApiError(Trouble.SHORT, f"the API server ended a watch after {lasted_s:.1f} s")
        self._synced_at_s = asyncio.get_running_loop().time()
        if self._problem is not None:
            log.info("%s: the API server is being followed again", self._where)
            self._problem = None

    async def _pause(self, error: ApiError) -> str:
        """Log what went wrong, wait, and return the next LIST's reason. Half of the wait is random, so that gateways
        spread."""
        now_s = asyncio.get_running_loop().time()
        is_news = self._problem is None or self._problem.trouble is not error.trouble
        if is_news or now_s - self._said_at_s >= SAY_AGAIN_S:
            self._said_at_s = now_s
            log.error("%s: %s; %s, and the gateway tries again", self._where, error, self._kept)
        self._problem = error
        self._errors += 1
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._failures, 10))
        self._failures += 1
        await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1))
        return error.trouble.value


def _version_of(event: Any) -> str:
    version: str = event.object.metadata.resource_version
    return version
