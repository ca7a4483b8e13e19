"""What the request path and readiness ask of the registry, with or without one."""

from __future__ import annotations

from typing import Protocol

from router.events.feed import EventFeed
from router.registry.reader import RegistryStatus
from router.routing.types import PodId


class RegistryView(Protocol):
    """The registry as the gateway looks at it; `RegistryReader` is the real one. Nothing here waits."""

    def reports(self, pod: PodId) -> bool:
        """Whether the pod publishes what it holds."""

    @property
    def expired(self) -> bool:
        """Whether every lease has run out."""

    def status(self) -> RegistryStatus:
        """Counters and state."""


class WithEvents:
    """A registry, and the KV events of engines that publish to none."""

    def __init__(self, registry: RegistryView, events: EventFeed) -> None:
        self._registry = registry
        self._events = events

    def reports(self, pod: PodId) -> bool:
        """Whether the pod says what it holds, to the registry or in events."""
        return self._registry.reports(pod) or self._events.reports(pod)

    @property
    def expired(self) -> bool:
        """Whether every lease has run out, and no engine's events are heard."""
        return self._registry.expired and not self._events.is_any_reporting

    def status(self) -> RegistryStatus:
        """The registry's."""
        return self._registry.status()


class NoRegistry:
    """A gateway without Redis: it knows what it routed itself."""

    expired = False

    def reports(self, pod: PodId) -> bool:
        """No pod does."""
        return False

    def status(self) -> RegistryStatus:
        """An empty registry."""
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
