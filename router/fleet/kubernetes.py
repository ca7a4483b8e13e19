"""Engines that are pods: a LIST, then WATCHes that go on from it, then a LIST again, for ever.

A watch alone is not enough: a removal that is missed while it is down never comes again. So whenever anything at all is
odd, and every few minutes even when nothing is, the whole list replaces what was known. While the API server cannot be
had, what was known stays; the fleet's probes find the dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager

from router.fleet.discovery import DiscoveryStatus, EngineAddress
from router.fleet.kubernetes_api import ApiError, PodApi, Trouble
from router.fleet.kubernetes_pods import PORT_ANNOTATION, WEIGHT_ANNOTATION, PodChange, PodTable

log = logging.getLogger(__name__)

RELIST_EVERY_S = 300.0
WATCH_S = (30, 60)
"""How long a watch is asked to last. Its end is the only sure sign that the server still talks to us."""
SHORT_WATCH_S = 5.0
"""A watch that ends sooner counts as a failure, lest a proxy that closes every stream is asked in a tight loop."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 5.0
"""Short, so that new pods are found soon after an outage; at worst one LIST per gateway in so many seconds."""
SAY_AGAIN_S = 60.0
SHOWN_NAMES = 10


class KubernetesDiscovery:
    """The pods of one API. `connect` gives it with fresh credentials; `port`: a number, or a containerPort's name.

    `annotations` count for pods that do not have them, `key` is what their engines are shown, `name` is for the log.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[PodApi]],
        *,
        port: int | str,
        annotations: Mapping[str, str] | None = None,
        key: str = "",
        name: str = "",
        rng: random.Random | None = None,
    ) -> None:
        self._connect = connect
        self._port = port
        self._rng = rng or random.Random()
        self._table = PodTable(port, annotations, key)
        self._where = f"discovery of {name}" if name else "discovery"
        self._failures = 0
        self._synced_at_s: float | None = None
        self._watching_since_s: float | None = None
        """When the watch began that goes on."""
        self._problem: ApiError | None = None
        self._said_at_s = -math.inf
        self._portless: frozenset[str] = frozenset()
        self._weightless: frozenset[str] = frozenset()
        self._relists: Counter[str] = Counter()
        self._errors = 0

    def status(self) -> DiscoveryStatus:
        """Synced: at the last LIST, or the end of the last watch that ran its full time.

        A problem is over when a watch has lasted longer than one that counts as a failure.
        """
        began_s = self._watching_since_s
        is_followed = began_s is not None and asyncio.get_running_loop().time() - began_s >= SHORT_WATCH_S
        problem = None if self._problem is None or is_followed else f"{self._problem.trouble}: {self._problem}"
        return DiscoveryStatus(self._synced_at_s, problem, self._errors, dict(self._relists))

    async def watch(self) -> AsyncIterator[frozenset[EngineAddress]]:
        """Every pod that is, or soon may be, an engine; after each change. Never ends."""
        known: frozenset[EngineAddress] | None = None
        reason = "start"
        while True:
            try:
                self._relists[reason] += 1
                async with contextlib.aclosing(self._follow()) as changes:
                    async for _ in changes:
                        self._note_annotations()
                        addresses = self._table.addresses()
                        if addresses != known:
                            known = addresses
                            ready = sum(address.is_ready for address in known)
                            log.info("%s: %d pods, %d of them Ready", self._where, len(known), ready)
                            yield addresses
                reason = "periodic"
            except ApiError as error:
                reason = await self._pause(error)
            except Exception as error:  # outermost loop: what nobody foresaw must not end discovery
                log.exception("%s", self._where)
                reason = await self._pause(ApiError(Trouble.MALFORMED, repr(error)))

    async def _follow(self) -> AsyncGenerator[None, None]:
        """Keep the table current from one LIST until the next is due; yields when it may have changed."""
        loop = asyncio.get_running_loop()
        async with self._connect() as api:
            pods, version = await api.list()
            self._table.replace(pods)
            self._synced_at_s = loop.time()
            yield
            relist_at = loop.time() + RELIST_EVERY_S
            while (left_s := relist_at - loop.time()) > 2 * SHORT_WATCH_S:
                began_at = self._watching_since_s = loop.time()
                try:
                    watching = api.watch(version, math.ceil(min(left_s, self._rng.uniform(*WATCH_S))))
                    async with contextlib.aclosing(watching) as events:
                        async for event in events:
                            version = event.object.metadata.resource_version
                            if isinstance(event, PodChange):
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
        """Say what went wrong and wait, half of it at random so that gateways spread. The reason of the next LIST."""
        now_s = asyncio.get_running_loop().time()
        is_news = self._problem is None or self._problem.trouble is not error.trouble
        if is_news or now_s - self._said_at_s >= SAY_AGAIN_S:
            self._said_at_s = now_s
            log.error("%s: %s; the engines known so far stay, and it is tried again", self._where, error)
        self._problem = error
        self._errors += 1
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._failures, 10))
        self._failures += 1
        await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1))
        return error.trouble.value

    def _note_annotations(self) -> None:
        """Say which pods' annotations cannot be followed, each pod once while it is so."""
        portless, weightless = self._table.without_port(), self._table.without_weight()
        if new := portless - self._portless:
            log.warning(
                "%s: no port for %s: neither the annotation %s nor a containerPort named %s",
                self._where,
                _some(new),
                PORT_ANNOTATION,
                self._port,
            )
        if new := weightless - self._weightless:
            log.warning("%s: %s of %s is no number from 0.01 to 100", self._where, WEIGHT_ANNOTATION, _some(new))
        self._portless, self._weightless = portless, weightless


def _some(names: frozenset[str]) -> str:
    """Names in order, as many as a line of a log may have."""
    more = [f"{len(names) - SHOWN_NAMES} more"] if len(names) > SHOWN_NAMES else []
    return ", ".join([*sorted(names)[:SHOWN_NAMES], *more])
