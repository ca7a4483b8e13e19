"""Measures, in virtual time, the time to first token of a prompt that a lower tier holds and the pool has lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import looptime

from engine.backend.profiles import SimProfile
from engine.backend.sim import SimBackend
from engine.cache.eviction import Eviction
from engine.cache.prefix_cache import PrefixCache
from engine.loop.metrics import EngineMetrics
from engine.loop.step_loop import EngineLoop
from engine.sched.request import Request
from engine.sched.scheduler import Scheduler, SchedulerConfig
from engine.tiers.build import make_tiers
from engine.tiers.stores.emulated import EmulatedCopies
from engine.tiers.stores.opening import emulated_store
from engine.tiers.stores.place import Place
from engine.tiers.stores.stats import TierStats
from engine.tiers.tiers import Tiers

BLOCK = 16
STEP_TOKENS = 2048
T = TypeVar("T")


def in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine in virtual time, without real waits, and return its result."""
    with asyncio.Runner(loop_factory=looptime.new_event_loop) as runner:
        return runner.run(work)


@dataclass
class Pod:
    """An emulated device with or without a tier below its pool."""

    loop: EngineLoop
    cache: PrefixCache
    scheduler: Scheduler
    tiers: Tiers | None
    copies: EmulatedCopies | None
    next_id: int = 0

    async def first_token_s(self, prompt: list[int], *, answer: int = 1) -> float:
        """Return the seconds until the prompt's first token; `answer`: total tokens to wait for."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        self.next_id += 1
        async with self.loop.submit([Request(self.next_id, prompt, max_tokens=answer)]) as stream:
            took_s = [loop.time() - start_s async for _ in stream]
        return took_s[0]

    async def learn(self, profile: SimProfile) -> None:
        """Run prefills of many lengths and short answers, so that the scheduler learns the cost of computing."""
        for i in range(16):
            await self.first_token_s([2_000_000 + i] * (200 + 331 * i % 4000), answer=3)
        await self.settle()

    async def settle(self) -> None:
        """Wait until all copies have ended."""
        while self.tiers is not None and self.tiers.is_busy:
            await asyncio.sleep(0.5)
            self.loop.wake()

    @property
    def stats(self) -> TierStats:
        """Return the tiers' counts."""
        assert self.tiers is not None
        return self.tiers.stats


@asynccontextmanager
async def engine(profile: SimProfile, bytes_per_s: float | None, *, tier_tokens: int = 400_000) -> AsyncIterator[Pod]:
    """Run an engine. `bytes_per_s`: rate of the tier; None: no tier."""
    blocks = profile.kv_tokens // BLOCK
    cache, clock = PrefixCache(blocks, BLOCK), asyncio.get_running_loop()
    tiers, copies = None, None
    holder: list[EngineLoop] = []
    if bytes_per_s is not None:
        block_bytes = BLOCK * profile.kv_token_bytes
        store = emulated_store(
            clock,
            Place.HOST,
            tier_tokens // BLOCK * block_bytes,
            pool_blocks=blocks,
            block_bytes=block_bytes,
            bytes_per_s=bytes_per_s,
        )
        assert isinstance(store.telling, EmulatedCopies)
        copies = store.telling
        tiers = make_tiers(
            cache,
            [store],
            eviction=Eviction.LRU,
            step_tokens=STEP_TOKENS,
            clock=clock.time,
            on_end=lambda: holder[0].wake(),
        )
    scheduler = Scheduler(cache, SchedulerConfig(STEP_TOKENS, 64, 64), tiers)
    loop = EngineLoop(
        scheduler,
        SimBackend(profile, vocab_size=1000),
        on_changes=lambda changes: None,
        metrics=EngineMetrics("bench"),
        step_deadline_s=1e6,
        check_in_s=tiers.check_in_s if tiers is not None else None,
    )
    holder.append(loop)
    task = asyncio.create_task(loop.run())
    try:
        yield Pod(loop, cache, scheduler, tiers, copies)
    finally:
        task.cancel()
        await asyncio.wait([task])


@dataclass(frozen=True)
class Point:
    """Seconds to the first token of a prompt."""

    tokens: int
    bytes_per_s: float
    with_tiers_s: float
    computed_s: float
    fetched_s: float
    """Seconds if everything that can be fetched is fetched."""
    share: float
    """Fetched blocks / blocks held."""

    @property
    def of_computing(self) -> float:
        """Return the time relative to computing everything; the bar is 1.05."""
        return self.with_tiers_s / self.computed_s

    @property
    def of_the_better(self) -> float:
        """Return the time relative to the better way; the bar is 1.15."""
        return self.with_tiers_s / min(self.computed_s, self.fetched_s)


async def race(profile: SimProfile, tokens: int, bytes_per_s: float, *, believed: float | None = None) -> Point:
    """Return a prompt's times. `believed`: the tier's rate until now, if it was different."""
    prompt = [7 + i % 1000 for i in range(tokens)]
    async with engine(profile, believed or bytes_per_s) as pod:
        await pod.learn(profile)
        computed_s = await pod.first_token_s(prompt)
        assert pod.tiers is not None
        assert pod.copies is not None
        link = pod.tiers._links[0]
        await pod.settle()
        sequence = pod.cache.open(prompt)
        if len(link.lower.find(sequence, tokens // BLOCK)) < tokens // BLOCK:
            # The engine did not find the prompt worth keeping. If the tier holds it anyway, the engine must not be
            # slower.
            assert link.lower.hold(sequence, tokens // BLOCK) is not None
            link.lower.commit(sequence, tokens)
            link.lower.release(sequence)
        pod.copies.bytes_per_s = bytes_per_s
        before = pod.stats.hit_tokens.total()
        pod.cache.reset()
        with_tiers_s = await pod.first_token_s(prompt)
        hit = pod.stats.hit_tokens.total() - before
        await pod.settle()
        held = (tokens - 1) // BLOCK
        left_s = await pod.first_token_s(prompt)  # the whole prompt is in the pool now
        fetched_s = held * BLOCK * profile.kv_token_bytes / bytes_per_s + left_s
        return Point(tokens, bytes_per_s, with_tiers_s, computed_s, fetched_s, hit / (held * BLOCK))
