"""An engine in virtual time whose pool has lost a prompt that a tier below still has: the time to its first token."""

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
from engine.contract.events import Tier
from engine.loop import EngineLoop
from engine.metrics import EngineMetrics
from engine.sched.request import Request
from engine.sched.scheduler import Scheduler, SchedulerConfig
from engine.tiers.build import emulated_store, make_tiers
from engine.tiers.emulated import EmulatedCopies
from engine.tiers.stats import TierStats
from engine.tiers.tiers import Tiers

BLOCK = 16
STEP_TOKENS = 2048
T = TypeVar("T")


def in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """What the coroutine returns; its clock does not wait."""
    with asyncio.Runner(loop_factory=looptime.new_event_loop) as runner:
        return runner.run(work)


@dataclass
class Pod:
    """An emulated device with one tier below its pool, or none."""

    loop: EngineLoop
    cache: PrefixCache
    scheduler: Scheduler
    tiers: Tiers | None
    copies: EmulatedCopies | None
    next_id: int = 0

    async def first_token_s(self, prompt: list[int]) -> float:
        """Seconds until the prompt's first token."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        self.next_id += 1
        async with self.loop.submit([Request(self.next_id, prompt, max_tokens=1)]) as stream:
            async for _ in stream:
                break
        return loop.time() - start_s

    async def learn(self, profile: SimProfile) -> None:
        """Prefills of many lengths, so that the scheduler knows what computing costs."""
        for i in range(16):
            await self.first_token_s([2_000_000 + i] * (200 + 331 * i % 4000))
        await self.settle()

    async def settle(self) -> None:
        """All copies have ended."""
        while self.tiers is not None and self.tiers.is_busy:
            await asyncio.sleep(0.5)
            self.loop.wake()

    @property
    def stats(self) -> TierStats:
        """What the tiers have done."""
        assert self.tiers is not None
        return self.tiers.stats


@asynccontextmanager
async def engine(profile: SimProfile, bytes_per_s: float | None, *, tier_tokens: int = 400_000) -> AsyncIterator[Pod]:
    """`bytes_per_s`: of the tier; None: without one."""
    blocks = profile.kv_tokens // BLOCK
    cache, clock = PrefixCache(blocks, BLOCK), asyncio.get_running_loop()
    tiers, copies = None, None
    holder: list[EngineLoop] = []
    if bytes_per_s is not None:
        block_bytes = BLOCK * profile.kv_token_bytes
        store = emulated_store(
            clock,
            Tier.HOST,
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
    """When all of it that can be fetched is."""
    share: float
    """Of the blocks held, those that were fetched."""

    @property
    def of_computing(self) -> float:
        """1.05 at most is the bar."""
        return self.with_tiers_s / self.computed_s

    @property
    def of_the_better(self) -> float:
        """1.15 at most is the bar."""
        return self.with_tiers_s / min(self.computed_s, self.fetched_s)


async def race(profile: SimProfile, tokens: int, bytes_per_s: float, *, believed: float | None = None) -> Point:
    """`believed`: what the tier's rate was until now, where that is another."""
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
            # It was not worth keeping. An engine that has it for another reason must not lose by that.
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
        left_s = await pod.first_token_s(prompt)  # all of it in the pool now
        fetched_s = held * BLOCK * profile.kv_token_bytes / bytes_per_s + left_s
        return Point(tokens, bytes_per_s, with_tiers_s, computed_s, fetched_s, hit / (held * BLOCK))
