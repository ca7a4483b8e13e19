"""Copies beside steps, on the CPU with real threads: no step makes or awaits a copy, and no copy awaits a step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.backend import host_tier
from engine.model.checkpoint import make_checkpoint
from engine.sched.plan import StepPlan, StepResult
from engine.tiers.copies.base import BlockRun, Direction, Moved, RunningJob
from engine.tiers.copies.copier import CopyLimits
from engine.tiers.stores import opening
from engine.tiers.stores.place import Place
from engine.tiers.stores.threads import ThreadedCopies
from tests.conftest import wait_until
from tests.engine.tiers.test_host_tier import BLOCK, PROMPT_TOKENS, Engine, engine

HELD = (PROMPT_TOKENS - 1) // BLOCK
PIECE_BLOCKS = 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    make_checkpoint(folder, hidden_size=32, layers=2, heads=2, kv_heads=1, intermediate_size=32, max_position=512)
    return folder


class Watched:
    """Wraps a tier's copies: records their threads and the blocks under way, and holds a gate before each copy."""

    def __init__(self, copies: ThreadedCopies) -> None:
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.most_blocks = 0
        self.blocks = dict.fromkeys(Direction, 0)
        mover, start = copies._mover, copies.start

        def made(run: BlockRun) -> Moved:
            self.threads.add(threading.get_ident())
            assert self.gate.wait(60)
            moved = move(run)
            self.blocks[run.direction] -= run.blocks
            return moved

        def asked(job: Sequence[BlockRun]) -> RunningJob:
            direction = job[0].direction
            self.blocks[direction] += sum(run.blocks for run in job)
            self.most_blocks = max(self.most_blocks, self.blocks[direction])
            return start(job)

        move = mover.move
        mover.move, copies.start = made, asked  # type: ignore[method-assign]


class Gated:
    """Wraps a backend: steps begin at once, and end when the gate is open."""

    def __init__(self, pod: Engine) -> None:
        self.gate, self.begun = asyncio.Event(), 0
        self.gate.set()
        self.threads: set[int] = set()
        assert pod.state.service is not None
        backend = pod.state.service.loop._backend
        step: Callable[[StepPlan], StepResult] = backend._step  # type: ignore[attr-defined]
        run: Callable[[StepPlan], Awaitable[StepResult]] = backend.run

        def on_its_thread(plan: StepPlan) -> StepResult:
            self.threads.add(threading.get_ident())
            return step(plan)

        async def gated(plan: StepPlan) -> StepResult:
            self.begun += 1
            await self.gate.wait()
            return await run(plan)

        backend._step, backend.run = on_its_thread, gated  # type: ignore[attr-defined, method-assign]


@asynccontextmanager
async def small_pieces(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, **fields: Any
) -> AsyncIterator[tuple[Engine, list[Watched], Gated]]:
    """An engine that copies in pieces of two blocks, one piece at a time."""
    watched: list[Watched] = []
    tell = ThreadedCopies.tell

    def told(copies: ThreadedCopies, on_end: Callable[[], None] | None) -> None:
        if on_end is not None:
            watched.append(Watched(copies))
        tell(copies, on_end)

    monkeypatch.setattr(ThreadedCopies, "tell", told)
    block_bytes = 2 * 2 * BLOCK * 16 * 4  # layers, keys and values, tokens, numbers of one head in float32
    limits = CopyLimits(PIECE_BLOCKS * block_bytes, PIECE_BLOCKS * block_bytes, 2**28)
    for module in (host_tier, opening):
        monkeypatch.setattr(module, "LIMITS", limits)
    async with engine(checkpoint, host_cache_bytes=2**24, **fields) as pod:
        tiers: Any = pod.scheduler._tiers
        assert tiers.sizes()[0].block_bytes == block_bytes
        yield pod, watched, Gated(pod)


async def test_what_has_been_copied_is_taken_in_while_a_step_runs(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole prompt is copied down during one step, in nine pieces, one at a time. Its blocks are then free for other
    requests, and the step's result is right."""
    async with small_pieces(checkpoint, monkeypatch) as (pod, (host,), steps):
        short = [2, *range(4, 100)]  # it fits while all blocks of the other prompt are held
        cold, computed = (await pod.answer(1))[0], (await pod.answer(2, prompt=short))[0]
        await pod.settled()
        assert pod.state.service is not None
        pod.state.service.loop.reset_cache()
        host.gate.clear()
        await pod.answer(1)
        tiers: Any = pod.scheduler._tiers
        stats = tiers.stats
        before = stats.demoted[Place.HOST]
        steps.gate.clear()
        begun = steps.begun
        asked = asyncio.create_task(pod.answer(2, prompt=short))
        await wait_until(lambda: steps.begun > begun, what="a step")
        assert tiers.is_busy
        host.gate.set()
        await wait_until(lambda: stats.demoted[Place.HOST] == before + HELD, what="the copies of all blocks")
        assert (steps.begun, len(pod.scheduler._steps)) == (begun + 1, 1), "the step goes on"
        assert not asked.done()
        steps.gate.set()
        assert (await asked)[0] == computed
        warm, cached = await pod.answer(1)
        assert warm == cold
        assert cached >= HELD * BLOCK


async def test_no_step_makes_a_copy_and_little_is_under_way(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For every tier and both directions, copies have separate threads, and the blocks under way are bounded."""
    fields = {"disk_cache_bytes": 2**24, "disk_cache_path": tmp_path / "disk"}
    fields |= {"shared_cache_path": tmp_path / "shared", "shared_cache_bytes": 2**24}
    async with small_pieces(checkpoint, monkeypatch, **fields) as (pod, watched, steps):
        for first in (1, 2, 3, 1, 2, 3):
            await pod.answer(first)
            await pod.settled()
        assert pod.metric("warmroute_tier_hit_tokens_total", tier="host") >= 2 * HELD * BLOCK
        assert len(watched) == 3
        for copies in watched:
            assert copies.threads, "copies were made"
            assert threading.get_ident() not in copies.threads, "the thread that plans steps has copied"
            assert not copies.threads & steps.threads
            assert 0 < copies.most_blocks <= PIECE_BLOCKS
