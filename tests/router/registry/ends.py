"""Both ends of the registry for tests: an engine that only holds and publishes keys, and a gateway that only
follows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine

from engine.cache.changes import KeyChanges
from engine.contract.events import Keys, Tier
from engine.contract.fetch_costs import NO_FETCH_COSTS
from engine.contract.keys import PrefixKey
from engine.contract.load import LoadReport
from engine.loop.publish import Origin, Publisher
from router.registry.index import PrefixIndex
from router.registry.reader import RegistryReader
from router.views.types import PodId
from tests.conftest import wait_until
from tests.redis_server import RedisServer

MODEL = "llama"
LEASE_S = 1.5


class FakeEngine:
    """Holds keys as an engine's cache does, and publishes them."""

    def __init__(self, server: RedisServer, pod: str, *, epoch: int, stride: int = 256, pending: int = 200_000) -> None:
        self.pod = PodId(pod)
        self.keys: dict[PrefixKey, Tier] = {}
        self.fetch = NO_FETCH_COSTS
        self.publisher = Publisher(
            server.url,
            Origin(MODEL, pod, epoch, stride),
            lease_s=LEASE_S,
            load=lambda: LoadReport(running=len(self.keys), fetch=self.fetch),
            held=self.held,
            max_pending_keys=pending,
        )

    def held(self) -> tuple[Keys, Keys, Keys]:
        gpu, host, disk = (tuple(k for k, t in self.keys.items() if t is tier) for tier in Tier)
        return gpu, host, disk

    def change(self, stored: dict[int, Tier], removed: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        gone = tuple(PrefixKey(k) for k in removed if self.keys.pop(PrefixKey(k), None) is not None)
        new = tuple((PrefixKey(k), tier) for k, tier in stored.items())
        self.keys.update(new)
        self.publisher.offer(KeyChanges(removed=gone, stored=new))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FakeEngine]:
        async with _at_work(self.publisher.run()):
            yield self


class Gateway:
    """A reader, its index and the loads that it received."""

    def __init__(self, server: RedisServer, *, stride: int = 256) -> None:
        self.index = PrefixIndex()
        self.loads: dict[PodId, LoadReport] = {}
        self.reader = RegistryReader(server.url, self.index, self.loads.__setitem__, stride=stride, lease_s=LEASE_S)

    @contextlib.asynccontextmanager
    async def following(self, *engines: FakeEngine) -> AsyncIterator[Gateway]:
        self.reader.set_pods({engine.pod: MODEL for engine in engines})
        async with _at_work(self.reader.run()):
            yield self

    def held(self, pod: PodId) -> dict[PrefixKey, Tier]:
        return {key: tier for tier, keys in self.index.held(pod).items() for key in keys}

    def agrees(self, *engines: FakeEngine) -> bool:
        return all(self.held(engine.pod) == engine.keys for engine in engines)

    async def wait_equal(self, *engines: FakeEngine, deadline_s: float = 30.0) -> None:
        await wait_until(lambda: self.agrees(*engines), deadline_s, "an index that equals what the engines hold")


@contextlib.asynccontextmanager
async def _at_work(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run `work` while the block lasts."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled(), "the work must end at once when it is cancelled"
