"""Wraps a backend that accepts one step at a time, so that it accepts two."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from engine.backend.base import Backend
from engine.sched.plan import PENDING, SequenceChunk, StepPlan, StepResult
from engine.sched.request import Request


class TwoInFlight:
    """Accepts a step while another runs, like a device that knows tokens before the host does."""

    max_in_flight = 2

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._last: asyncio.Future[dict[Request, int]] = asyncio.get_running_loop().create_future()
        self._last.set_result({})
        self.pending = 0
        """The number of input tokens that were taken from the previous step, not from the plan."""

    async def run(self, plan: StepPlan) -> StepResult:
        known = [list(chunk.request.output_tokens) for chunk in plan.chunks]
        before, this = self._last, asyncio.get_running_loop().create_future()
        self._last = this
        try:
            sampled = await before
            chunks = [self._resolve(chunk, output, sampled) for chunk, output in zip(plan.chunks, known, strict=True)]
            result = await self._backend.run(StepPlan(tuple(chunks)))
            this.set_result({c.request: result.sampled[c.request.id].token for c in plan.chunks if c.samples})
        finally:
            this.cancel()  # if this step failed, the next step fails, too
        return result

    def _resolve(self, chunk: SequenceChunk, output: list[int], sampled: dict[Request, int]) -> SequenceChunk:
        """Return the chunk that the backend would get if the host had waited."""
        if PENDING in chunk.tokens:
            self.pending += 1
            output.append(sampled[chunk.request])
            chunk = replace(chunk, tokens=(output[-1],))
        assert not chunk.samples or chunk.output_index == len(output)
        return replace(chunk, request=replace(chunk.request, output_tokens=output))

    async def close(self) -> None:
        await self._backend.close()
