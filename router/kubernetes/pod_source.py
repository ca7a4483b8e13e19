"""Discovers engines that are pods, from the API server (`kubernetes_watch.py`); the fleet's probes find dead
engines."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager

from router.fleet.discovery import DiscoveryStatus, EngineAddress
from router.kubernetes.api import ObjectApi
from router.kubernetes.pods import PORT_ANNOTATION, WEIGHT_ANNOTATION, Pod, PodTable, Ports
from router.kubernetes.watch import Watch

log = logging.getLogger(__name__)

SHOWN_NAMES = 10


class KubernetesDiscovery:
    """The pods of one API. `connect` returns that API with fresh credentials; `port`: see `PodTable`.

    `annotations` count for pods without their own, `key` names the key that their engines get, `name` is for the log.
    """

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[ObjectApi[Pod]]],
        *,
        port: Ports,
        annotations: Mapping[str, str] | None = None,
        key: str = "",
        name: str = "",
        rng: random.Random | None = None,
    ) -> None:
        self._port = port
        self._table = PodTable(port, annotations, key)
        self._where = f"discovery of {name}" if name else "discovery"
        self._pods: Watch[Pod] = Watch(
            connect, self._table, where=self._where, kept="the engines known so far stay", rng=rng
        )
        self._portless: frozenset[str] = frozenset()
        self._weightless: frozenset[str] = frozenset()

    def status(self) -> DiscoveryStatus:
        """See `Watch`."""
        return self._pods.status()

    async def watch(self) -> AsyncIterator[frozenset[EngineAddress]]:
        """Yield every pod that is, or soon may be, an engine, after each change. Never ends."""
        known: frozenset[EngineAddress] | None = None
        async with contextlib.aclosing(self._pods.changes()) as changes:
            async for _ in changes:
                self._note_annotations()
                addresses = self._table.addresses()
                if addresses != known:
                    known = addresses
                    ready = sum(address.is_ready for address in known)
                    log.info("%s: %d engines, %d of them Ready", self._where, len(known), ready)
                    yield addresses

    def _note_annotations(self) -> None:
        """Log which pods' annotations are invalid, each pod once while that lasts."""
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
            log.warning("%s: %s of %s is not a number from 0.01 to 100", self._where, WEIGHT_ANNOTATION, _some(new))
        self._portless, self._weightless = portless, weightless


def _some(names: frozenset[str]) -> str:
    """Return the names in order, as many as a line of the log may have."""
    more = [f"{len(names) - SHOWN_NAMES} more"] if len(names) > SHOWN_NAMES else []
    return ", ".join([*sorted(names)[:SHOWN_NAMES], *more])
