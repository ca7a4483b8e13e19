"""The interface of the registry for the request path and readiness, with or without Redis."""

from __future__ import annotations

from typing import Protocol

from router.events.feed import EventFeed
from router.registry.reader import RegistryStatus
from router.views.types import PodId


class RegistryView(Protocol):
    """The registry as the gateway sees it; `RegistryReader` is the real one. No method waits."""

    def reports(self, pod: PodId) -> bool:
        """Whether the pod publishes what its cache holds."""

    @property
    def expired(self) -> bool:
        """Whether all leases have expired."""

    def status(self) -> RegistryStatus:
        """Return counters and state."""


class WithEvents:
    """A registry, together with the KV events of engines that do not publish to it."""

    def __init__(self, registry: RegistryView, events: EventFeed) -> None:
        self._registry = registry
        self._events = events

    def reports(self, pod: PodId) -> bool:
        """Whether the pod publishes what its cache holds, to the registry or in events."""
        return self._registry.reports(pod) or self._events.reports(pod)

    @property
    def expired(self) -> bool:
        """Whether all leases have expired and no engine's events are received."""
        return self._registry.expired and not self._events.is_any_reporting

    def status(self) -> RegistryStatus:
        """Return the registry's status."""
        return self._registry.status()


class NoRegistry:
    """The registry of a gateway without Redis, which knows only what it routed itself."""

    expired = False

    def reports(self, pod: PodId) -> bool:
        """Return False: no pod reports."""
        return False

    def status(self) -> RegistryStatus:
        """Return the status of an empty registry."""
        return RegistryStatus(
            connected=False,
            pods_known=0,
            pods_synced=0,
            expired=False,
            messages=0,
            resyncs=0,
            refused=0,
            last_error=None,
        )
