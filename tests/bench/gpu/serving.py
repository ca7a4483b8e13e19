"""Time to the first token over a cached prefix, and the throughput of whole workloads."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tests.bench.gpu.engine_run import Answer, Engine
from tests.bench.gpu.workloads import Workload


@dataclass(frozen=True, slots=True)
class WarmFigure:
    """TTFT of one prompt of which most is cached."""

    prompt_tokens: int
    cached_tokens: int
    """As the engine reported it."""
    warm_s: float
    cold_s: float


async def measure_warm_ttft(engine: Engine, prompt_tokens: int, cached_tokens: int, rounds: int) -> WarmFigure:
    """Median of `rounds` prompts that share their first `cached_tokens` with an earlier one, each alone."""
    draw = random.Random(5)

    def ids(count: int) -> list[int]:
        return draw.choices(range(100), k=count)

    engine.forget()
    shared = ids(cached_tokens)
    cold = await engine.ask([*shared, *ids(prompt_tokens - cached_tokens)], 1)
    warm = [await engine.ask([*shared, *ids(prompt_tokens - cached_tokens)], 1) for _ in range(rounds)]
    return WarmFigure(
        prompt_tokens,
        min(answer.cached_tokens for answer in warm),
        statistics.median(answer.first_token_s for answer in warm),
        cold.first_token_s,
    )


@dataclass(frozen=True, slots=True)
class ServedWorkload:
    """What an engine made of a workload."""

    workload: Workload
    answers: Sequence[Sequence[int]]
    """Empty: not answered when its time was over."""
    elapsed_s: float
    cached_tokens: int | None = None
    """Prompt tokens not computed; None: the engine does not say."""
    attention: str = ""
    """The implementation that served; empty: the engine does not say."""

    @property
    def unanswered(self) -> int:
        """Requests whose answer had not ended when the time was over."""
        return sum(not answer for answer in self.answers)

    @property
    def output_tokens_per_s(self) -> float:
        """Where requests are unanswered, more than it is: as if all of them had ended when the time was over."""
        tokens = self.workload.output_tokens if self.unanswered else sum(map(len, self.answers))
        return tokens / self.elapsed_s


async def serve(engine: Engine, workload: Workload) -> ServedWorkload:
    """All requests at once, over an empty cache, after a few that warm up."""
    await engine.ask_all([(ids, 2) for ids, _ in workload.prompts[:4]])
    engine.forget()
    answers: list[Answer]
    answers, elapsed_s = await engine.ask_all(workload.prompts)
    cached = sum(answer.cached_tokens for answer in answers)
    return ServedWorkload(workload, [answer.tokens for answer in answers], elapsed_s, cached)
