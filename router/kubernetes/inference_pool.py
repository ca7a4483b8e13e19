"""The engines of an InferencePool: follows the pool's selector and ports, and the pods that these select.

When a pool changes, the pods of the new selector are listed first; until that is done the old ones stay. When a pool is
deleted or becomes invalid, nothing changes: the last valid one stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from router.fleet.discovery import Discovery, DiscoveryStatus, EngineAddress
from router.kubernetes.inference import Custom, Pool, PoolTable
from router.kubernetes.watch import Watch

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Followed:
    """The pods of one state of the pool."""

    pods: Discovery
    task: asyncio.Task[None] | None = None
    found: frozenset[EngineAddress] | None = None


class PoolDiscovery:
    """The engines of the pool in `table`, which `pools` keeps current; `follow` makes the discovery of its pods."""

    def __init__(self, pools: Watch[Custom], table: PoolTable, follow: Callable[[Pool], Discovery]) -> None:
        self._pools = pools
        self._table = table
        self._follow = follow
        self._pool: Pool | None = None
        """The pool whose pods are followed."""
        self._said: str | None = None
        self._followed: list[_Followed] = []
        """The newest is last; the older ones are dropped when the newest one's pods are known."""

    async def watch(self) -> AsyncIterator[frozenset[EngineAddress]]:
        """See Discovery."""
        changed = asyncio.Event()
        told: frozenset[EngineAddress] | None = None
        following = asyncio.create_task(self._follow_pool(changed))
        following.add_done_callback(lambda _: changed.set())
        try:
            while True:
                await changed.wait()
                changed.clear()
                for task in (following, *(one.task for one in self._followed)):
                    if task is not None and task.done():
                        task.result()  # raises the error that ended it
                known = [one for one in self._followed if one.found is not None]
                self._leave(known[:-1])
                if known and known[-1].found is not None and known[-1].found != told:
                    told = known[-1].found
                    yield told
        finally:
            ending = [following, *(one.task for one in self._followed if one.task is not None)]
            self._followed.clear()
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    def status(self) -> DiscoveryStatus:
        """Return one status of the pool and its pods, synced at the older time, and once the pods are known."""
        pool = self._pools.status()
        pods = [one.pods.status() for one in self._followed]
        known = [one.pods.status().synced_at_s for one in self._followed if one.found is not None]
        times = [pool.synced_at_s, *known[-1:]]
        synced = [at_s for at_s in times if at_s is not None]
        problems = [pool.problem, self._table.trouble, *(status.problem for status in pods)]
        relists = Counter(pool.relists)
        for status in pods:
            relists.update(status.relists)
        return DiscoveryStatus(
            min(synced) if known and len(synced) == len(times) else None,
            "; ".join(problem for problem in problems if problem) or None,
            pool.errors + sum(status.errors for status in pods),
            dict(relists),
            is_pool_valid=pool.synced_at_s is not None and self._table.trouble is None,
        )

    def _leave(self, followed: list[_Followed]) -> None:
        for one in followed:
            self._followed.remove(one)
            if one.task is not None:
                one.task.cancel()

    async def _follow_pool(self, changed: asyncio.Event) -> None:
        async with contextlib.aclosing(self._pools.changes()) as changes:
            async for _ in changes:
                self._say()
                pool = self._table.pool
                if pool is None or pool == self._pool:
                    continue
                has_moved = self._pool is None or (pool.selector, pool.ports) != (self._pool.selector, self._pool.ports)
                self._warn(pool)
                self._pool = pool
                if not has_moved:
                    continue
                log.info("InferencePool %s: pods with %s, ports %s", self._table.name, pool.selector, pool.ports)
                one = _Followed(self._follow(pool))
                self._leave([older for older in self._followed if older.found is None])
                self._followed.append(one)
                one.task = asyncio.create_task(self._follow_pods(one, changed))
                one.task.add_done_callback(lambda _: changed.set())

    async def _follow_pods(self, one: _Followed, changed: asyncio.Event) -> None:
        async for addresses in one.pods.watch():
            one.found = addresses
            changed.set()

    def _say(self) -> None:
        """Log the fault of the pool when it changes."""
        trouble = self._table.trouble
        if trouble == self._said:
            return
        self._said = trouble
        if trouble is None:
            log.info("InferencePool %s: it can be followed again", self._table.name)
        else:
            kept = "no engines are known" if self._table.pool is None else "the last one known is still followed"
            log.error("%s; %s", trouble, kept)

    def _warn(self, pool: Pool) -> None:
        """Warn about what is valid but hardly intended."""
        name = self._table.name
        if pool.failure_mode == "FailOpen":
            log.warning(
                "InferencePool %s: failureMode FailOpen: an Envoy that streams bodies in full duplex still answers "
                "500 while no picker answers (router/picker/GATEWAYS.md): run two pickers",
                name,
            )
        if pool.protocol != "http":
            log.warning("InferencePool %s: appProtocol %s: probes and metrics use HTTP/1.1", name, pool.protocol)
