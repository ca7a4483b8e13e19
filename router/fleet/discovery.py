"""Where engines are. A discovery yields the FULL set after every change, so a lost event leaves no stale engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """One engine between two restarts, and where it is. If `url` and `life` are equal, the engine and its cache are the
    same."""

    url: str
    """Base URL, without a trailing slash; unique within a set."""
    life: str = ""
    """Changes when another engine takes over the URL, for example a pod that gets the IP of a deleted one."""
    is_ready: bool = True
    """False: no new requests, though the engine is still there, for example in a pod that terminates."""
    model: str | None = None
    """The only model that requests are sent for; None: every model that the engine lists."""
    weight: float = 1.0
    """Its share of the traffic relative to others: 2 takes twice as much as 1. See `PodState.weight`."""
    kv_events_port: int | None = None
    """TCP port at which it publishes KV events; None: discovery does not know."""
    kv_replay_port: int | None = None
    """TCP port at which it replays them."""
    ranks: int | None = None
    """Data-parallel ranks behind the URL, numbered from 0; None: not given."""
    name: str | None = field(default=None, compare=False)
    """Its name in the place where it was found, such as its Kubernetes pod. No other engine may have this as its pod
    id."""
    key: str = field(default="", compare=False)
    """Name of the gateway's key that this engine gets; empty: the common key."""
    born: str = field(default="", compare=False)
    """When it was created, as text that sorts by time: if two engines have the same URL, the later one counts."""


@dataclass(frozen=True, slots=True)
class DiscoveryStatus:
    """How current the set is."""

    synced_at_s: float | None
    """Event-loop time at which the set was last known to be complete; None before the first time."""
    problem: str | None = None
    """The last failure, until it is over."""
    errors: int = 0
    """Failed attempts to read the set, since the start."""
    relists: Mapping[str, int] = field(default_factory=dict)
    """How often the complete set was read, by reason: `start`, `periodic`, or a kind of trouble."""
    is_pool_valid: bool | None = None
    """Whether the InferencePool exists and can be followed; None: no pool is followed."""


class Discovery(Protocol):
    """A source of engine addresses. It survives its own failures: while it cannot read the set, it yields nothing."""

    def watch(self) -> AsyncIterator[frozenset[EngineAddress]]:
        """Yield every address, first when the first complete list is known, then after each change.

        If the iterator ends, the set will not change again.
        """

    def status(self) -> DiscoveryStatus:
        """Return how current the set is."""


class StaticDiscovery:
    """A fixed list of engines."""

    def __init__(self, urls: Iterable[str]) -> None:
        self._addresses = frozenset(EngineAddress(url) for url in urls)

    async def watch(self) -> AsyncIterator[frozenset[EngineAddress]]:
        """Yield the list, once."""
        yield self._addresses

    def status(self) -> DiscoveryStatus:
        """Return a status that says that the set is current now."""
        return DiscoveryStatus(asyncio.get_running_loop().time())


class OverTls:
    """The addresses of another discovery, with https instead of http."""

    def __init__(self, plain: Discovery) -> None:
        self._plain = plain

    async def watch(self) -> AsyncIterator[frozenset[EngineAddress]]:
        """See Discovery."""
        async for addresses in self._plain.watch():
            yield frozenset(replace(a, url=f"https:{a.url.partition(':')[2]}") for a in addresses)

    def status(self) -> DiscoveryStatus:
        """See Discovery."""
        return self._plain.status()
