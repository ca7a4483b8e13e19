"""Time to first token over a cached prefix, and the throughput of whole workloads."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tests.bench.gpu.parts.engine_run import Answer, Engine
from tests.bench.gpu.workloads import Workload


@dataclass(frozen=True, slots=True)
class WarmFigure:
    """TTFT of a prompt that is mostly cached."""

    prompt_tokens: int
    cached_tokens: int
    """Cached tokens reported by the engine."""
    warm_s: float
    cold_s: float


async def measure_warm_ttft(engine: Engine, prompt_tokens: int, cached_tokens: int, rounds: int) -> WarmFigure:
    """Return the median of `rounds` prompts. Each runs alone, and begins with the same `cached_tokens` tokens as an
    earlier prompt."""
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
    """An engine's answers to a workload."""

    workload: Workload
    answers: Sequence[Sequence[int]]
    """An empty answer: not finished at the time limit."""
    elapsed_s: float
    cached_tokens: int | None = None
    """Prompt tokens that were not computed; None: the engine does not report them."""
    attention: str = ""
    """The attention implementation in use; empty: the engine does not report it."""

    @property
    def unanswered(self) -> int:
        """Count the requests whose answer had not ended at the time limit."""
        return sum(not answer for answer in self.answers)

    @property
    def output_tokens_per_s(self) -> float:
        """Return tokens per second; an upper bound if requests are unanswered: it assumes that all ended in time."""
        tokens = self.workload.output_tokens if self.unanswered else sum(map(len, self.answers))
        return tokens / self.elapsed_s


async def serve(engine: Engine, workload: Workload) -> ServedWorkload:
    """Send all requests at once to an empty cache, after a few warm-up requests."""
    await engine.ask_all([(ids, 2) for ids, _ in workload.prompts[:4]])
    engine.forget()
    answers: list[Answer]
    answers, elapsed_s = await engine.ask_all(workload.prompts)
    cached = sum(answer.cached_tokens for answer in answers)
    return ServedWorkload(workload, [answer.tokens for answer in answers], elapsed_s, cached)
