"""Any backend that takes one step at a time, made into one that takes two."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from engine.backend.base import Backend
from engine.sched.plan import PENDING, SequenceChunk, StepPlan, StepResult
from engine.sched.request import Request


class TwoInFlight:
    """Takes a step while another runs, as a device would that knows the tokens which the host does not."""

    max_in_flight = 2

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._last: asyncio.Future[dict[Request, int]] = asyncio.get_running_loop().create_future()
        self._last.set_result({})
        self.pending = 0
        """Tokens taken from the step before."""

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
            this.cancel()  # where it failed: the step behind it fails too
        return result

    def _resolve(self, chunk: SequenceChunk, output: list[int], sampled: dict[Request, int]) -> SequenceChunk:
        """The chunk as the backend would get it had the host waited."""
        if PENDING in chunk.tokens:
            self.pending += 1
            output.append(sampled[chunk.request])
            chunk = replace(chunk, tokens=(output[-1],))
        assert not chunk.samples or chunk.output_index == len(output)
        return replace(chunk, request=replace(chunk.request, output_tokens=output))

    async def close(self) -> None:
        await self._backend.close()
