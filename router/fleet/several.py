"""Several discoveries as one. If one of them cannot read its set, the engines of the others stay in service."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence

from router.fleet.discovery import Discovery, DiscoveryStatus, EngineAddress

FIRST_WAIT_S = 10.0
"""The first set waits this long for every source. Then the engines of the sources that could look take requests: a
namespace that the gateway may no longer read must not keep a restarted gateway from serving the others."""


class SeveralDiscoveries:
    """The engines of all `sources`. `names` are their names in messages about problems."""

    def __init__(self, sources: Sequence[Discovery], names: Sequence[str]) -> None:
        self._sources = tuple(sources)
        self._names = tuple(names)
        self._began_s: float | None = None
        """When `watch` began, by the loop's clock; None: not yet."""

    async def watch(self) -> AsyncIterator[frozenset[EngineAddress]]:
        """Yield the union, first when every source has looked or FIRST_WAIT_S have passed, then after each change."""
        loop = asyncio.get_running_loop()
        self._began_s = loop.time()
        known: list[frozenset[EngineAddress] | None] = [None] * len(self._sources)
        changed = asyncio.Event()

        async def follow(place: int) -> None:
            async for addresses in self._sources[place].watch():
                known[place] = addresses
                changed.set()

        tasks = [asyncio.create_task(follow(place)) for place in range(len(self._sources))]
        for task in tasks:
            task.add_done_callback(lambda _: changed.set())
        told: frozenset[EngineAddress] | None = None
        try:
            while True:
                first_at_s = self._began_s + FIRST_WAIT_S
                if None not in known or (loop.time() >= first_at_s and any(found is not None for found in known)):
                    union = merged(found for found in known if found is not None)
                    if union != told:
                        told = union
                        yield union
                ended = [task for task in tasks if task.done()]
                for task in ended:
                    task.result()  # raises the error that ended it
                if len(ended) == len(tasks) and not changed.is_set():
                    return
                waits = told is None and loop.time() < first_at_s
                try:
                    async with asyncio.timeout_at(first_at_s if waits else None):
                        await changed.wait()
                except TimeoutError:
                    continue
                changed.clear()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def status(self) -> DiscoveryStatus:
        """Return the oldest status of the sources. A source that has never looked counts as synced at the start of
        `watch`.

        The status is not synced while no source has looked, or while the first set still waits.
        """
        found = [source.status() for source in self._sources]
        synced = [status.synced_at_s for status in found]
        looked = [at_s for at_s in synced if at_s is not None]
        waits = self._began_s is None or asyncio.get_running_loop().time() < self._began_s + FIRST_WAIT_S
        is_synced = bool(looked) and (len(looked) == len(found) or not waits)
        never_s = [self._began_s] if self._began_s is not None and len(looked) < len(found) else []
        problems = [
            f"{name}: {status.problem}" for name, status in zip(self._names, found, strict=True) if status.problem
        ]
        relists: Counter[str] = Counter()
        for status in found:
            relists.update(status.relists)
        return DiscoveryStatus(
            min([*looked, *never_s]) if is_synced else None,
            "; ".join(problems) or None,
            sum(status.errors for status in found),
            dict(relists),
        )


def merged(sets: Iterable[frozenset[EngineAddress]]) -> frozenset[EngineAddress]:
    """Return all addresses, one for each URL: the newer engine; if one engine is in several sets, the first counts."""
    by_url: dict[str, EngineAddress] = {}
    for addresses in sets:
        for address in addresses:
            other = by_url.get(address.url)
            if other is None or (other.born, other.life) < (address.born, address.life):
                by_url[address.url] = address
    return frozenset(by_url.values())
