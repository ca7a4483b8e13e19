"""A backend without a model: a profile gives the time of each step, and tokens come from a hash."""

from __future__ import annotations

import asyncio
import math
import struct

from xxhash import xxh3_64_intdigest

from engine.backend.profiles import SimProfile
from engine.sched.plan import SampledToken, StepPlan, StepResult
from engine.sched.request import Request

_TOKEN_OF = struct.Struct("<qq")
CATCH_UP_S = 0.1
"""The greatest lateness of this process, in seconds, that the emulated device makes up for."""


class SimBackend:
    """Emulates a device of the given profile on the event loop's clock, so it works in virtual time too.

    A token depends only on the backend's seed, the request's seed and the token's position, not on the prompt. It is
    never one of the request's stop tokens, so an answer is as long as the request allows. Log-probabilities are those
    of a uniform distribution.

    While a request goes on from step to step, the emulated device is always busy: a step begins when the step before it
    ended, even if this process, one of many on a few cores, calls up to `CATCH_UP_S` late.
    """

    max_in_flight = 1

    def __init__(self, profile: SimProfile, vocab_size: int, seed: int = 0) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
        self._profile = profile
        self._vocab_size = vocab_size
        self._seed = seed % 2**64
        self._ends_s = -math.inf
        """The end of the last step on the event loop's clock; it may be in the future."""
        self._requests: frozenset[int] = frozenset()
        """Ids of the last step's requests."""
        self._is_waited_for = False
        self._left_until_s = -math.inf
        """The end of the last step whose caller was cancelled."""

    async def run(self, plan: StepPlan) -> StepResult:
        """Wait as long as the step takes. Raises RuntimeError while another step is in progress."""
        now_s, elapsed_s = asyncio.get_running_loop().time(), self._profile.step_s(plan)
        if self._is_waited_for or now_s < self._left_until_s:
            raise RuntimeError("a step is in progress: the backend runs one at a time")
        requests = frozenset([chunk.request.id for chunk in plan.chunks])
        goes_on = not self._requests.isdisjoint(requests)
        start_s = max(self._ends_s, now_s - CATCH_UP_S) if goes_on else now_s
        self._ends_s, self._requests = start_s + elapsed_s, requests
        self._is_waited_for = True
        try:
            await asyncio.sleep(max(0.0, self._ends_s - now_s))
        except asyncio.CancelledError:
            self._left_until_s = self._ends_s
            raise
        finally:
            self._is_waited_for = False
        sampled = {chunk.request.id: self._sample(chunk.request) for chunk in plan.chunks if chunk.samples}
        return StepResult(sampled, elapsed_s)

    async def close(self) -> None:
        """Wait for the step in progress."""
        ends_s = self._ends_s if self._is_waited_for else self._left_until_s
        await asyncio.sleep(max(0.0, ends_s - asyncio.get_running_loop().time()))

    def _sample(self, request: Request) -> SampledToken:
        position = len(request.prompt_tokens) + len(request.output_tokens)
        # The mask makes any integer that the API accepts fit 63 bits.
        packed = _TOKEN_OF.pack(request.sampling.seed & (2**63 - 1), position)
        first = token = xxh3_64_intdigest(packed, self._seed) % self._vocab_size
        stops = request.stop_token_ids
        if first in stops:
            around = [(first + i) % self._vocab_size for i in range(min(self._vocab_size, len(stops) + 1))]
            token = next((t for t in around if t not in stops), first)
        if request.sampling.logprobs is None:
            return SampledToken(token)
        logprob = -math.log(self._vocab_size)
        count = min(request.sampling.logprobs, self._vocab_size)
        return SampledToken(token, logprob, tuple(((token + i) % self._vocab_size, logprob) for i in range(count)))
