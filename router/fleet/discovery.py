"""Where engines are. A discovery yields the FULL set after every change, so that a lost event leaves no ghost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
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


class Discovery(Protocol):
    """A source of engine addresses. It survives its own failures: while it cannot look, it yields nothing."""

    def watch(self) -> AsyncIterator[frozenset[EngineAddress]]:
        """Every address, first when the first complete list is known, then after each change.

        An iterator that ends says that the set will not change again.
        """


class StaticDiscovery:
    """A fixed list of engines."""

    def __init__(self, urls: Iterable[str]) -> None:
        self._addresses = frozenset(EngineAddress(url) for url in urls)

    async def watch(self) -> AsyncIterator[frozenset[EngineAddress]]:
        """The list, once."""
        yield self._addresses
