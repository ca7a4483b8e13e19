"""A backend without a model: a profile gives the time of each step, and tokens come from a hash."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable

from xxhash import xxh3_64_intdigest

from engine.backend.profiles import SimProfile
from engine.backend.sim_following import Following
from engine.sched.plan import SampledToken, StepPlan, StepResult
from engine.sched.request import Request

_TOKEN_OF = struct.Struct("<qq")
CATCH_UP_S = 0.1
"""The greatest lateness of this process, in seconds, that the emulated device makes up for."""


class SimBackend:
    """Emulates a device of the given profile on the event loop's clock, so it works in virtual time too.

    A token depends only on the backend's seed, the request's seed and the token's position, not on the prompt. It is
    never one of the request's stop tokens, so an answer is as long as the request allows. Log-probabilities are those
    of a uniform distribution. With a constraint, tokens depend on the constraint too, and the answer ends when it is
    whole (`sim_following.py`).

    While a request goes on from step to step, the emulated device is always busy: a step begins when the step before it
    ended, even if this process, one of many on a few cores, calls up to `CATCH_UP_S` late.
    """

    max_in_flight = 1

    def __init__(
        self, profile: SimProfile, vocab_size: int, seed: int = 0, token_bytes: Callable[[int], bytes] | None = None
    ) -> None:
        """`token_bytes`: the bytes of a token; needed for requests with masks."""
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
        self._profile = profile
        self._vocab_size = vocab_size
        self._seed = seed % 2**64
        self._ends_s = -math.inf
        """The end of the last step on the event loop's clock; it may be in the future."""
        self._requests: frozenset[int] = frozenset()
        """Ids of the last step's requests."""
        self._following = None if token_bytes is None else Following(vocab_size, token_bytes)
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
        followed = self._follow(plan)
        try:
            await asyncio.sleep(max(0.0, self._ends_s - now_s))
            chosen = {} if followed is None else await followed
        except asyncio.CancelledError:
            self._left_until_s = self._ends_s
            raise
        finally:
            self._is_waited_for = False
        sampled = {
            chunk.request.id: self._reported(chunk.request, chosen[chunk.request.id])
            if chunk.request.id in chosen
            else self._sample(chunk.request)
            for chunk in plan.chunks
            if chunk.samples
        }
        return StepResult(sampled, elapsed_s)

    async def close(self) -> None:
        """Wait for the step in progress."""
        ends_s = self._ends_s if self._is_waited_for else self._left_until_s
        await asyncio.sleep(max(0.0, ends_s - asyncio.get_running_loop().time()))

    def _follow(self, plan: StepPlan) -> asyncio.Future[dict[int, int]] | None:
        """Begin to choose tokens on a thread for the requests with masks, while the emulated device computes. Return
        request id -> token; None if there are no such requests."""
        if all(chunk.request.masks is None for chunk in plan.chunks):
            return None
        if (following := self._following) is None:
            raise ValueError("requests with masks need token_bytes")
        requests = [chunk.request for chunk in plan.chunks if chunk.samples and chunk.request.masks is not None]

        def choose() -> dict[int, int]:
            following.keep({chunk.request.id for chunk in plan.chunks})
            return {request.id: following.choose(request, self._number(request)) for request in requests}

        return asyncio.get_running_loop().run_in_executor(None, choose)

    def _number(self, request: Request) -> int:
        """Return the hash of the request's seed and the position of its next token."""
        position = len(request.prompt_tokens) + len(request.output_tokens)
        # The mask makes any integer that the API accepts fit 63 bits.
        packed = _TOKEN_OF.pack(request.sampling.seed & (2**63 - 1), position)
        return xxh3_64_intdigest(packed, self._seed)

    def _sample(self, request: Request) -> SampledToken:
        first = token = self._number(request) % self._vocab_size
        stops = request.stop_token_ids
        if first in stops:
            around = [(first + i) % self._vocab_size for i in range(min(self._vocab_size, len(stops) + 1))]
            token = next((t for t in around if t not in stops), first)
        return self._reported(request, token)

    def _reported(self, request: Request, token: int) -> SampledToken:
        """Return the token with the log-probabilities that the request asks for."""
        if request.sampling.logprobs is None:
            return SampledToken(token)
        logprob = -math.log(self._vocab_size)
        count = min(request.sampling.logprobs, self._vocab_size)
        return SampledToken(token, logprob, tuple(((token + i) % self._vocab_size, logprob) for i in range(count)))
