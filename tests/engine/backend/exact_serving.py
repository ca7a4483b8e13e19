"""Runs a model behind the real scheduler and prefix cache, and keeps every logit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from engine.backend.sampler import sample
from engine.backend.torch_backend import TorchBackend
from engine.cache.index import IndexKind
from engine.cache.prefix_cache import PrefixCache
from engine.sched.plan import StepResult
from engine.sched.request import Request
from engine.sched.scheduler import Scheduler, SchedulerConfig
from engine.tiers.tiers import Tiers

BLOCK_SIZE = 4


@dataclass
class Answer:
    """A request's tokens and logits."""

    cached_tokens: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)

    def bits(self) -> torch.Tensor:
        """The logits as integers, which are equal if and only if the bits are."""
        return torch.stack(self.logits).view(torch.int32)


def _never() -> None:
    raise AssertionError("work waits, and nothing can be computed")


def serve(
    backend: TorchBackend,
    cache: PrefixCache,
    requests: Sequence[Request],
    step_tokens: int,
    *,
    tiers: Tiers | None = None,
    wait: Callable[[], object] = _never,
) -> list[Answer]:
    """Serve all requests together to their ends, in steps of at most `step_tokens` tokens.

    `wait`: called when nothing can be computed because blocks are still on their way from the tiers.
    """
    scheduler = Scheduler(cache, SchedulerConfig(max_step_tokens=step_tokens, max_running=8, max_waiting=100), tiers)
    answers = {request.id: Answer() for request in requests}
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        if (plan := scheduler.schedule()) is None:
            wait()
            continue
        rows = backend.logits(plan.chunks)
        sampling = [chunk.request for chunk in plan.chunks if chunk.samples]
        for request, row in zip(sampling, rows, strict=True):
            answers[request.id].logits.append(row)
        tokens = sample(rows, sampling) if sampling else []
        sampled = {request.id: token for request, token in zip(sampling, tokens, strict=True)}
        for output in scheduler.complete(StepResult(sampled)):
            answers[output.request_id].cached_tokens = output.cached_tokens
    return list(answers.values())


def empty(backend: TorchBackend, index: IndexKind = IndexKind.HASH) -> PrefixCache:
    """Return an empty cache over the backend's pool. Every slot has NaN, so reading an unwritten slot shows."""
    backend.pool.data.fill_(torch.nan)
    return PrefixCache(backend.pool.block_count, backend.pool.block_size, index=index)
