"""Steps of chosen sizes through the backend; each is submitted while the one before computes, as in the step loop."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.backend.cuda.backend import CudaBackend
from engine.sched.plan import PENDING, SequenceChunk, StepPlan
from engine.sched.request import Request
from tests.bench.gpu.arithmetic import decode_work, prefill_work
from tests.bench.gpu.parts.ceilings import Ceilings
from tests.bench.gpu.parts.engine_run import GREEDY

_WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True)
class DecodeFigure:
    """Decoding at one batch and context."""

    batch: int
    context: int
    step_s: float
    roofline_s: float
    shared_blocks: bool
    """The batch's KV exceeds the pool, so sequences read blocks of other sequences; see `Steps.tables`."""
    rounds_s: Sequence[float] = ()
    """The time of a step in each round; `step_s` is the median."""

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.step_s

    @property
    def share(self) -> float:
        """Return the share of the roofline's speed."""
        return self.roofline_s / self.step_s


@dataclass(frozen=True, slots=True)
class PrefillFigure:
    """One cold prompt."""

    tokens: int
    elapsed_s: float
    flops: float
    flops_per_s: float
    """The measured matmul rate."""
    rounds_s: Sequence[float] = ()
    """The seconds of each round; `elapsed_s` is the median."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.elapsed_s

    @property
    def share(self) -> float:
        """Return the share of the measured matmul rate."""
        return self.flops / self.elapsed_s / self.flops_per_s


class Steps:
    """A backend, and blocks of its pool in random order, like those of a pool in use."""

    def __init__(self, backend: CudaBackend, blocks: Sequence[int], seed: int = 0) -> None:
        self.backend = backend
        self._block_size = backend.pool.block_size
        self._blocks = random.Random(seed).sample(blocks, len(blocks))
        self._next_id = 0

    async def run(self, plans: Iterable[StepPlan]) -> None:
        """Run all plans, `max_in_flight` at a time."""
        flights: deque[asyncio.Task[object]] = deque()
        try:
            for plan in plans:
                flights.append(asyncio.create_task(self.backend.run(plan)))
                await asyncio.sleep(0)  # lets the call begin before the next one
                if len(flights) >= self.backend.max_in_flight:
                    await flights.popleft()
            while flights:
                await flights.popleft()
        finally:
            await asyncio.gather(*flights, return_exceptions=True)

    def tables(self, batch: int, context: int, room: int) -> tuple[list[list[int]], bool]:
        """Return blocks of each sequence for `context` tokens and `room` more, and whether sequences share blocks they
        read.

        Blocks that sequences write are never shared. If the pool is too small, as many sequences as fit read their own
        blocks, and the next ones read the same blocks again in the same order. A kernel takes sequences one after
        another. So between two sequences that share blocks, it reads everything the pool holds of a layer, and no cache
        helps the second.
        """
        size = self._block_size
        read, total = context // size, -(-(context + room) // size)
        own = total - read
        if batch * own > len(self._blocks):
            raise ValueError(
                f"a batch of {batch} needs {batch * own} blocks to write; the pool has {len(self._blocks)}"
            )
        tails, rest = self._blocks[: batch * own], self._blocks[batch * own :]
        if read > len(rest):
            raise ValueError(f"a context of {context} needs {read} blocks; the pool has {len(rest)} left")
        apart = len(rest) // read if read else batch
        heads = [rest[i % apart * read : i % apart * read + read] for i in range(batch)]
        return [[*head, *tails[i * own : (i + 1) * own]] for i, head in enumerate(heads)], batch > apart

    def decode_plans(self, tables: Sequence[Sequence[int]], context: int, steps: int) -> Iterable[StepPlan]:
        """Yield steps of one token of each sequence, at first after `context` tokens."""
        prompt = [1] * context
        first = self._next_id
        self._next_id += len(tables)
        requests = [Request(first + i, prompt, 1 << 20, GREEDY, output_tokens=[1]) for i in range(len(tables))]
        frozen = [tuple(table) for table in tables]
        for step in range(steps):
            start = context + step
            token = (PENDING,) if step else (1,)
            width = start // self._block_size + 1
            yield StepPlan(
                tuple(
                    SequenceChunk(request, start, token, table[:width], True, True)
                    for request, table in zip(requests, frozen, strict=True)
                )
            )

    def prefill_plans(self, tokens: int, step_tokens: int, cached: int = 0) -> Iterable[StepPlan]:
        """Yield the steps of one prompt after its first `cached` tokens."""
        size = self._block_size
        blocks = self._blocks[: -(-tokens // size)]
        prompt = [1 + i % 100 for i in range(tokens)]
        self._next_id += 1
        request = Request(self._next_id, prompt, 1, GREEDY)
        for start in range(cached, tokens, step_tokens):
            end = min(tokens, start + step_tokens)
            yield StepPlan(
                (SequenceChunk(request, start, prompt[start:end], blocks[: -(-end // size)], end == tokens, False),)
            )

    async def decode_step_s(self, tables: Sequence[Sequence[int]], context: int, steps: int) -> float:
        """Return the seconds of a decode step, over `steps` steps after a few warm-up steps.

        The scheduler's planning time is not included, because the plans are made beforehand.
        """
        plans = list(self.decode_plans(tables, context, _WARM_UP_STEPS + steps))
        await self.run(plans[:_WARM_UP_STEPS])
        start_s = time.perf_counter()
        await self.run(plans[_WARM_UP_STEPS:])
        return (time.perf_counter() - start_s) / steps

    async def decode(self, batch: int, context: int, steps: int, rounds: int, ceilings: Ceilings) -> DecodeFigure:
        """Return the median round of `steps` steps; the roofline is that of the middle step."""
        tables, shares = self.tables(batch, context, _WARM_UP_STEPS + steps)
        times = [await self.decode_step_s(tables, context, steps) for _ in range(rounds)]
        middle = context + _WARM_UP_STEPS + steps // 2
        pool = self.backend.pool.data
        work = decode_work(self.backend.model.config, [middle] * batch, pool.dtype.itemsize)
        roofline_s = work.seconds(ceilings.copy_bytes_per_s, ceilings.matmul_flops_per_s)
        return DecodeFigure(batch, context, statistics.median(times), roofline_s, shares, times)

    async def prefill(self, tokens: int, step_tokens: int, rounds: int, ceilings: Ceilings) -> PrefillFigure:
        """Return the median of `rounds`, after one warm-up round."""
        times = []
        for _ in range(rounds + 1):
            plans = list(self.prefill_plans(tokens, step_tokens))
            start_s = time.perf_counter()
            await self.run(plans)
            times.append(time.perf_counter() - start_s)
        config, size = self.backend.model.config, self.backend.pool.data.dtype.itemsize
        work = prefill_work(config, 0, tokens, step_tokens, size)
        return PrefillFigure(tokens, statistics.median(times[1:]), work.flops, ceilings.matmul_flops_per_s, times[1:])
