"""A backend without a model: steps take the time a profile gives them, tokens come from a hash."""

from __future__ import annotations

import asyncio
import math
import struct

from xxhash import xxh3_64_intdigest

from engine.backend.profiles import SimProfile
from engine.sched.plan import SampledToken, StepPlan, StepResult
from engine.sched.request import Request

_TOKEN_OF = struct.Struct("<qq")


class SimBackend:
    """Emulates a device of the given profile on the event loop's clock, so it works in virtual time too.

    A token depends on the backend's seed, the request's seed and its position alone, not on the prompt. It is never one
    of the request's stop tokens: an answer is as long as the request allows. Its distribution counts as uniform.
    """

    def __init__(self, profile: SimProfile, vocab_size: int, seed: int = 0) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
        self._profile = profile
        self._vocab_size = vocab_size
        self._seed = seed % 2**64
        self._step: asyncio.Task[None] | None = None

    async def run(self, plan: StepPlan) -> StepResult:
        """Wait as long as the step takes. Raises RuntimeError while another step is in progress."""
        if self._step is not None and not self._step.done():
            raise RuntimeError("a step is in progress: the backend runs one at a time")
        elapsed_s = self._profile.step_s(plan)
        self._step = asyncio.create_task(asyncio.sleep(elapsed_s))
        await asyncio.shield(self._step)
        sampled = {chunk.request.id: self._sample(chunk.request) for chunk in plan.chunks if chunk.samples}
        return StepResult(sampled, elapsed_s)

    async def close(self) -> None:
        """Wait for the step in progress."""
        if self._step is not None:
            await self._step

    def _sample(self, request: Request) -> SampledToken:
        position = len(request.prompt_tokens) + len(request.output_tokens)
        # The request's seed is masked: any integer the API accepts fits 63 bits then.
        packed = _TOKEN_OF.pack(request.sampling.seed & (2**63 - 1), position)
        first = xxh3_64_intdigest(packed, self._seed) % self._vocab_size
        around = [(first + i) % self._vocab_size for i in range(min(self._vocab_size, len(request.stop_token_ids) + 1))]
        token = next((t for t in around if t not in request.stop_token_ids), first)
        if request.sampling.logprobs is None:
            return SampledToken(token)
        logprob = -math.log(self._vocab_size)
        count = min(request.sampling.logprobs, self._vocab_size)
        return SampledToken(token, logprob, tuple(((token + i) % self._vocab_size, logprob) for i in range(count)))
