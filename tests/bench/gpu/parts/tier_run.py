"""Promotion from the host tier, alone and during decoding."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass

import torch

from engine.backend.cuda.backend import CudaBackend
from engine.backend.cuda.copies import CudaCopyEngine, PageLockedPool
from engine.backend.host_memory import CpuBlockMover, HostPool
from engine.tiers.copies.base import BlockPair, CopyEngine, Direction
from engine.tiers.copies.copier import BlockCopier
from engine.tiers.stores.measure import drain, measure_rates
from engine.tiers.stores.threads import ThreadedCopies
from tests.bench.gpu.parts.ceilings import Ceilings
from tests.bench.gpu.parts.steps import Steps

_DEADLINE_S = 60.0
_STEPS = 8
_ROOM = 64
"""Tokens by which the decoding sequences may grow."""


@dataclass(frozen=True, slots=True)
class PromotionFigure:
    """Copies of one prompt's blocks from host slots to scattered blocks of the pool."""

    tokens: int
    bytes: int
    elapsed_s: float
    """Seconds from the request until `poll` has reported the end."""
    link_s: float
    """Bytes / the link's measured rate."""
    beside_decode_s: float
    """`elapsed_s` while decode steps run."""
    decode_step_s: float
    """Seconds of a decode step without a promotion."""
    decode_step_beside_s: float
    measured_up_bytes_per_s: float
    """Rate measured by the copier with events."""

    @property
    def ratio(self) -> float:
        return self.elapsed_s / self.link_s


def _drained_at_s(copier: BlockCopier) -> float:
    drain(copier, _DEADLINE_S)
    return time.perf_counter()


async def measure_promotion(
    backend: CudaBackend, tokens: int, beside: tuple[int, int], rounds: int, ceilings: Ceilings
) -> PromotionFigure:
    """Measure promotion. `beside`: batch and context of the decode steps that run meanwhile."""
    pool = backend.pool
    blocks = -(-tokens // pool.block_size)
    with ExitStack() as running:
        if pool.data.device.type == "cuda":
            host: HostPool = running.enter_context(closing(PageLockedPool(pool.data, blocks)))
            engine: CopyEngine = CudaCopyEngine(pool.data, host)
        else:  # a run that shows only that the bench works
            host = HostPool(pool.data, blocks)
            engine = running.enter_context(closing(ThreadedCopies(CpuBlockMover(pool.data, host), "promotion")))
        copier = BlockCopier(engine, time.monotonic)
        measure_rates(copier, blocks, _DEADLINE_S)
        scattered = random.Random(1).sample(range(pool.block_count), blocks)
        pairs = [BlockPair(slot, block) for slot, block in enumerate(scattered)]
        alone = []
        for _ in range(rounds):
            start_s = time.perf_counter()
            copier.promote(pairs)
            alone.append(await asyncio.to_thread(_drained_at_s, copier) - start_s)
        elapsed_s = statistics.median(alone)
        others = sorted(set(range(pool.block_count)) - set(scattered))
        (batch, context), decoding = beside, Steps(backend, others)
        tables, _ = decoding.tables(batch, context, _ROOM)
        step_s = await decoding.decode_step_s(tables, context, _STEPS)
        start_s = time.perf_counter()
        copier.promote(pairs)
        promotion = asyncio.create_task(asyncio.to_thread(_drained_at_s, copier))
        step_beside_s = await decoding.decode_step_s(
            tables, context, min(_ROOM // 2, max(_STEPS, round(elapsed_s / step_s)))
        )
        beside_s = await promotion - start_s
        arrived = pool.data[scattered].cpu().view(torch.uint8).view(blocks, -1)
        if not torch.equal(arrived, host.data):
            raise RuntimeError("what was promoted is not what the host tier held")
        up = copier.bytes_per_s(Direction.PROMOTE) or 0.0
    moved = blocks * host.slot_bytes
    return PromotionFigure(
        tokens=blocks * pool.block_size,
        bytes=moved,
        elapsed_s=elapsed_s,
        link_s=moved / ceilings.up_bytes_per_s,
        beside_decode_s=beside_s,
        decode_step_s=step_s,
        decode_step_beside_s=step_beside_s,
        measured_up_bytes_per_s=up,
    )
