"""Where engines are. A discovery yields the FULL set of URLs after every change, so a lost event leaves no ghost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Protocol


class Discovery(Protocol):
    """A source of engine URLs. It survives its own failures: while it cannot look, it yields nothing."""

    def watch(self) -> AsyncIterator[frozenset[str]]:
        """Every base URL (no trailing slash), first when the first complete list is known, then after each change.

        An iterator that ends says that the set will not change again.
        """


class StaticDiscovery:
    """A fixed list of engines."""

    def __init__(self, urls: Iterable[str]) -> None:
        self._urls = frozenset(urls)

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        """The list, once."""
        yield self._urls
