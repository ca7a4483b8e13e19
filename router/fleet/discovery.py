"""Where engines are. A discovery yields the FULL set after every change, so that a lost event leaves no ghost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """One life of one engine and where it is. Equal `url` and `life`: the same engine, with its cache."""

    url: str
    """Base URL, without a trailing slash; unique within a set."""
    life: str = ""
    """Changes when another engine takes over the URL, as a pod does that is given the IP of a deleted one."""
    is_ready: bool = True
    """False: no new requests, though the engine is still there, as a pod that terminates or is not Ready."""
    model: str | None = None
    """The one model requests are sent for; None: every model the engine lists."""
    weight: float = 1.0
    """How much of the traffic it can take beside others: 2 takes twice as much. See `Policy`."""
    kv_events_port: int | None = None
    """TCP port at which it publishes KV events, as far as discovery knows."""
    kv_replay_port: int | None = None
    """TCP port at which it replays them."""
    ranks: int | None = None
    """Data-parallel ranks behind the URL, numbered from 0; None: not told."""
    name: str | None = field(default=None, compare=False)
    """What it is called where it was found, such as the name of its Kubernetes pod. No other engine has that id."""
    key: str = field(default="", compare=False)
    """Which of the gateway's keys for engines it is shown; empty: the one for all."""
    born: str = field(default="", compare=False)
    """When it came to be: of two engines at one URL the one for which this sorts later is there."""


@dataclass(frozen=True, slots=True)
class DiscoveryStatus:
    """How current the set is."""

    synced_at_s: float | None
    """Event-loop time at which the set was last known to be the whole truth; None before the first time."""
    problem: str | None = None
    """The last trouble, while it lasts."""
    errors: int = 0
    """Failures to look, since the start."""
    relists: Mapping[str, int] = field(default_factory=dict)
    """Complete looks, by what led to them: `start`, `periodic`, or a kind of trouble."""


class Discovery(Protocol):
    """A source of engine addresses. It survives its own failures: while it cannot look, it yields nothing."""

    def watch(self) -> AsyncIterator[frozenset[EngineAddress]]:
        """Every address, first when the first complete list is known, then after each change.

        An iterator that ends says that the set will not change again.
        """

    def status(self) -> DiscoveryStatus:
        """How current the set is."""


class StaticDiscovery:
    """A fixed list of engines."""

    def __init__(self, urls: Iterable[str]) -> None:
        self._addresses = frozenset(EngineAddress(url) for url in urls)

    async def watch(self) -> AsyncIterator[frozenset[EngineAddress]]:
        """The list, once."""
        yield self._addresses

    def status(self) -> DiscoveryStatus:
        """Always current."""
        return DiscoveryStatus(asyncio.get_running_loop().time())


class OverTls:
    """The addresses of another discovery, with https for http."""

    def __init__(self, plain: Discovery) -> None:
        self._plain = plain

    async def watch(self) -> AsyncIterator[frozenset[EngineAddress]]:
        """See Discovery."""
        async for addresses in self._plain.watch():
            yield frozenset(replace(a, url=f"https:{a.url.partition(':')[2]}") for a in addresses)

    def status(self) -> DiscoveryStatus:
        """See Discovery."""
        return self._plain.status()
