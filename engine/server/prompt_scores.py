"""The log-probabilities of a prompt's own tokens, which a completion with `echo` and `logprobs` asks for.

A prompt token's log-probability is the one that it has as the answer to the tokens before it. So each token but the
first is a request for one answer token, which is forced. The requests share the prompt's KV by the cache: with those of
the batch before in it, a request computes at most as many tokens as a batch has requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.loop.step_loop import StepFailed
from engine.sched.plan import SampledToken
from engine.sched.request import FinishReason, Request
from engine.sched.sampling import SamplingParams
from engine.server.choices import PlacedToken
from engine.server.requests import GenerationJob, Prompt
from engine.server.service import EngineService

_BATCH = 32
"""Requests at a time."""
_FORCED = 1e30
"""Bias that makes a token the most probable one. The reported log-probability is that without a bias."""


async def prompt_scores(service: EngineService, job: GenerationJob) -> list[tuple[PlacedToken, ...]]:
    """Return the tokens of each prompt with their log-probabilities; a prompt's first token has none.

    Raises StepFailed, and what `EngineLoop.submit` raises.
    """
    return [await _scores(service, job, prompt) for prompt in job.prompts]


async def _scores(service: EngineService, job: GenerationJob, prompt: Prompt) -> tuple[PlacedToken, ...]:
    tokens = prompt.tokens
    found = [SampledToken(tokens[0])]
    for first in range(1, len(tokens), _BATCH):
        ends = range(first, min(first + _BATCH, len(tokens)))
        requests = await service.workers.run(_requests, service, job, prompt, ends)
        answers: dict[int, SampledToken] = {}
        async with service.loop.submit(requests) as stream:
            async for output in stream:
                if output.token is None or output.finish is FinishReason.ABORT:
                    raise StepFailed("the engine aborted the request")
                answers[output.request_id] = output.token
        for request, end in zip(requests, ends, strict=True):
            scored = answers[request.id]
            found.append(SampledToken(tokens[end], scored.logprob, scored.top))
    return tuple(PlacedToken(token, offset) for token, offset in zip(found, prompt.offsets, strict=True))


def _requests(service: EngineService, job: GenerationJob, prompt: Prompt, ends: Sequence[int]) -> list[Request]:
    """Return a request for each of the prompt's tokens at `ends`. Called on a thread."""
    requests = []
    for end in ends:
        before = prompt.tokens[:end]
        spans = tuple(span for span in prompt.spans if span.tokens <= end)
        requests.append(
            Request(
                id=service.new_id(),
                prompt_tokens=before,
                max_tokens=1,
                sampling=SamplingParams(
                    temperature=0.0, logit_bias={prompt.tokens[end]: _FORCED}, logprobs=job.sampling.logprobs
                ),
                key_spans=spans,
                salt=job.salt,
                hashed=service.scheduler.hash_prompt(before, job.salt, spans),
            )
        )
    return requests
