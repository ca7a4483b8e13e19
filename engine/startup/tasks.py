"""The engine at work: the step loop, the tiers and the publisher, and the order of their start and end."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from engine.backend.base import Backend
from engine.cache.index import IndexKind
from engine.cache.prefix_cache import PrefixCache
from engine.grammar.compiler import GrammarCompiler
from engine.loop.metrics import EngineMetrics, RegistryState
from engine.loop.publish import Origin, Publisher
from engine.loop.step_loop import EngineLoop
from engine.sched.scheduler import Scheduler, SchedulerConfig
from engine.server.service import EngineService, ServerState, TextWorkers
from engine.startup.background import background
from engine.startup.constants import CONSTANTS, Constants
from engine.startup.loaded import LoadedModel, StartError
from engine.startup.settings import EngineSettings
from engine.startup.tier_settings import emulated_stores, tiers_over
from engine.tiers.build import close_stores
from engine.tiers.exported import TierCollector
from engine.tiers.stores.store import Store
from engine.tiers.tiers import Tiers

CLOSE_S = 1.0
"""Seconds to close the backend after a forced end."""


class BackendStuck(Exception):
    """The backend does not close, because a step has not ended and its thread cannot be stopped."""


@asynccontextmanager
async def engine_tasks(
    settings: EngineSettings,
    state: ServerState,
    metrics: EngineMetrics,
    loaded: LoadedModel,
    port: int,
    force: asyncio.Event | None = None,
    constants: Constants = CONSTANTS,
) -> AsyncIterator[Callable[[], object]]:
    """Run the step loop and the publisher, with the service open to requests. Yields a call that ends the publishing.

    Raises BackendStuck at the exit if a step did not end before its deadline, or does not end after `force` is set.
    """
    wake = _Wake()
    cache, stores, tiers = _memory(settings, constants, loaded, wake)
    if tiers is not None:
        metrics.registry.register(TierCollector(tiers, settings.model_name))
    running = most_running(settings, constants, loaded.blocks * settings.block_size)
    scheduler = Scheduler(cache, _places(settings, constants, running), tiers)
    origin = Origin(
        settings.model_name, settings.pod_id or f"{socket.gethostname()}:{port}", time.time_ns(), constants.stride_bytes
    )
    publisher = _publisher(settings, constants, scheduler, origin)
    grammars = GrammarCompiler(loaded.vocabulary, wake, metrics.observe_constraint)
    loop = EngineLoop(
        scheduler,
        loaded.backend,
        on_changes=publisher.offer if publisher else _ignore,
        metrics=metrics,
        step_deadline_s=constants.step_deadline_s,
        check_in_s=tiers.check_in_s if tiers is not None else None,
        fills=grammars.fills,
    )
    wake.call = lambda: _after_copies(tiers, loop)
    workers = TextWorkers(constants.text_threads, constants.max_waiting + running)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_close, loaded.backend, loop, force or asyncio.Event())
        if tiers is not None:
            stack.push_async_callback(asyncio.to_thread, close_stores, stores, tiers)
        stack.callback(workers.close)
        stack.push_async_callback(grammars.close)
        stepping = await stack.enter_async_context(background(loop.run(), "step loop"))
        publishing = None
        if publisher is not None:
            publishing = await stack.enter_async_context(background(publisher.run(), "publisher"))
            # An engine whose step loop has ended must not attract requests.
            stepping.add_done_callback(lambda _: publishing.cancel())
        state.service = EngineService(
            model=loaded.text,
            loop=loop,
            scheduler=scheduler,
            workers=workers,
            metrics=metrics,
            pod_id=origin.pod_id,
            epoch=origin.epoch,
            registry=publisher.state if publisher is not None else RegistryState,
            on_fleet=publisher.follow_pace if publisher is not None else _ignore,
            grammars=grammars,
        )
        yield publishing.cancel if publishing is not None else lambda: None


def _memory(
    settings: EngineSettings, constants: Constants, loaded: LoadedModel, wake: Callable[[], None]
) -> tuple[PrefixCache, Sequence[Store], Tiers | None]:
    """Return the pool's cache, and the tiers below it with their stores. Raises StartError."""
    try:
        cache = PrefixCache(
            loaded.blocks,
            settings.block_size,
            index=IndexKind(settings.prefix_cache),
            eviction=constants.eviction,
            pinned_blocks=int(constants.pin_share * loaded.blocks),
            learnt_blocks=int(settings.keep_share * loaded.blocks),
        )
        stores = loaded.stores or emulated_stores(settings, loaded.blocks)
        plans_ahead = loaded.backend.max_in_flight > 1
        if not stores:
            return cache, stores, None
        return (
            cache,
            stores,
            tiers_over(settings, cache, stores, wake, eviction=constants.eviction, plans_ahead=plans_ahead),
        )
    except MemoryError:
        raise StartError(
            "the lists of KV blocks do not fit the memory: the KV pool or a tier below it is too large"
        ) from None


def most_running(settings: EngineSettings, constants: Constants, pool_tokens: int) -> int:
    """Return how many requests may run at once: as set, or by the size of the KV pool."""
    if settings.max_running:
        return settings.max_running
    return constants.running(0 if settings.device_kind == "cuda" else pool_tokens, settings.max_step_tokens)


def _places(settings: EngineSettings, constants: Constants, running: int) -> SchedulerConfig:
    return SchedulerConfig(
        settings.max_step_tokens, running, constants.max_waiting, least_kept_tokens=constants.pin_min_tokens
    )


def _publisher(
    settings: EngineSettings, constants: Constants, scheduler: Scheduler, origin: Origin
) -> Publisher | None:
    if not settings.redis_url:
        return None
    return Publisher(
        settings.redis_url, origin, lease_s=constants.lease_s, load=scheduler.load, held=scheduler.held_keys
    )


def _ignore(news: object) -> None:
    """The listener if there is no publisher."""


def _after_copies(tiers: Tiers | None, loop: EngineLoop) -> None:
    if tiers is not None:
        tiers.go_on()  # begins further copies now, not with the next step
    loop.wake()


class _Wake:
    """Wakes the step loop from any thread."""

    def __init__(self) -> None:
        self.call: Callable[[], None] = lambda: None
        self._loop = asyncio.get_running_loop()

    def __call__(self) -> None:
        with suppress(RuntimeError):  # the event loop has closed, so there are no more steps
            self._loop.call_soon_threadsafe(self.call)


async def _close(backend: Backend, loop: EngineLoop, force: asyncio.Event) -> None:
    closing = asyncio.ensure_future(backend.close())
    forced = asyncio.ensure_future(force.wait())
    try:
        if not loop.is_stuck:
            await asyncio.wait([closing, forced], return_when=asyncio.FIRST_COMPLETED)
        _, open_ = await asyncio.wait([closing], timeout=CLOSE_S)
    finally:
        forced.cancel()
    if open_:
        closing.cancel()
        raise BackendStuck("a step has not ended")
    await closing
