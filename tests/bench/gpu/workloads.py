"""Prompts for serving: only token ids, because the weights mean nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

Prompt = tuple[list[int], int]
"""Token ids, and the length of the answer."""

SHAREGPT_INPUT_MEAN, SHAREGPT_OUTPUT_MEAN = 161.31, 337.99
"""Mean tokens in the ShareGPT sample of the vLLM paper (arXiv 2309.06180, figure 11)."""
_SIGMA = 1.0
"""Standard deviation of the lengths' logarithms. It is our choice, because the paper only plots the lengths. The means
are the paper's."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are all sent at once."""

    name: str
    prompts: Sequence[Prompt]

    @property
    def input_tokens(self) -> int:
        return sum(len(ids) for ids, _ in self.prompts)

    @property
    def output_tokens(self) -> int:
        return sum(count for _, count in self.prompts)


def sharegpt_like(requests: int, vocab: int, seed: int, *, scale: float = 1.0, longest: int = 2048) -> Workload:
    """Return unrelated prompts with log-normal lengths and ShareGPT's means, times `scale`, cut at `longest`."""
    draw = random.Random(seed)
    prompts = []
    for _ in range(requests):
        length = _length(draw, SHAREGPT_INPUT_MEAN * scale, longest)
        prompts.append((_ids(draw, length, vocab), _length(draw, SHAREGPT_OUTPUT_MEAN * scale, longest)))
    return Workload("ShareGPT-like", prompts)


def shared_prefix(
    requests: int, vocab: int, seed: int, *, groups: int, prefix_tokens: int, scale: float = 1.0, longest: int = 2048
) -> Workload:
    """Return prompts; every `groups`-th begins with the same `prefix_tokens`. Other lengths are ShareGPT-like."""
    draw = random.Random(seed)
    prefixes = [_ids(draw, prefix_tokens, vocab) for _ in range(groups)]
    prompts = []
    for i in range(requests):
        own = _ids(draw, _length(draw, SHAREGPT_INPUT_MEAN * scale, longest), vocab)
        prompts.append(([*prefixes[i % groups], *own], _length(draw, SHAREGPT_OUTPUT_MEAN * scale, longest)))
    return Workload("shared prefix", prompts)


def _ids(draw: random.Random, count: int, vocab: int) -> list[int]:
    return draw.choices(range(vocab), k=count)


def _length(draw: random.Random, mean: float, longest: int) -> int:
    """Return a log-normal length of this mean (before the cut), at least 1."""
    return min(longest, max(1, round(draw.lognormvariate(math.log(mean) - _SIGMA**2 / 2, _SIGMA))))
