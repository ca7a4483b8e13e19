"""transformers' continuous batching on the same weights, device and requests, and whether its tokens equal ours."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from tests.bench.gpu.models import Model
from tests.bench.gpu.parts.serving import ServedWorkload
from tests.bench.gpu.workloads import Workload

TIE_BOUND = 0.32
"""Two answers may differ if the logits of their first different tokens are at most this far apart, in standard
deviations of all logits.

In bfloat16, two orders of summing (eager attention and SDPA on a CPU, 32 layers of 512, weights made as here) differ by
0.045 standard deviations in a logit, so by root two times 0.045 = 0.063 in the distance of two logits. The bound is
five times 0.063: not one of 100,000 tokens is expected to exceed it. The token of a wrong computation is several
deviations below the best.
"""
_STOP_S = 30.0
"""Time limit for the end of transformers' thread."""
NO_TIE = 1e9
"""The reported gap if it would be NaN, or if one answer is the beginning of the other."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Greedy answers of two engines to the same requests."""

    requests: int
    """Requests that both engines have answered."""
    equal: int
    """Requests with the same tokens throughout."""
    equal_tokens: int
    """Tokens before an answer differs from the other, and all tokens of equal answers."""
    tokens: int
    widest_gap: float
    """Largest gap between the logits of the first differing tokens, in standard deviations; 0 if no answers differ."""


class Transformers:
    """A model loaded for continuous batching with transformers' defaults, as its users get it."""

    def __init__(self, model: Model, *, small: bool) -> None:
        """`small`: limit its cache, which otherwise takes most of the memory."""
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        self.model: Any = model.transformers_model()
        self._device = model.device
        bounds: dict[str, Any] = {"num_blocks": 64, "max_batch_tokens": 256} if small else {}
        known = {field.name for field in fields(ContinuousBatchingConfig)}
        self._config = ContinuousBatchingConfig(**{k: v for k, v in bounds.items() if k in known})
        self._generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=16)

    def serve(self, workload: Workload, deadline_s: float) -> ServedWorkload:
        """Send all requests at once, after transformers' own warm-up and a few requests. Requests without an answer
        `deadline_s` after they were sent are given up. Raises RuntimeError if a request fails."""
        with self.model.continuous_batching_context_manager(
            generation_config=self._generation, continuous_batching_config=self._config, timeout=_STOP_S
        ) as manager:
            answered = False
            try:
                few = self._answers(manager, [(ids[:8], 2) for ids, _ in workload.prompts[:4]], deadline_s)
                if not all(few):
                    raise RuntimeError(f"transformers answered no request of 8 tokens within {deadline_s:.0f} s")
                start_s = time.perf_counter()
                answers = self._answers(manager, workload.prompts, deadline_s)
                elapsed_s, answered = time.perf_counter() - start_s, all(answers)
                # Read while the manager serves, because at its end it restores the model's earlier implementation.
                attention = str(self.model.config._attn_implementation)
            finally:
                if not answered:  # the manager would answer all requests before it ends
                    manager.stop(block=True, timeout=_STOP_S, hard_stop=True)
        return ServedWorkload(workload, answers, elapsed_s, attention=attention)

    def agreement(self, ours: Sequence[Sequence[int]], theirs: ServedWorkload) -> Agreement:
        """Compare token by token what both answered; where they differ, ask the model how far apart the tokens are."""
        equal = equal_tokens = 0
        widest = 0.0
        both = [row for row in zip(theirs.workload.prompts, ours, theirs.answers, strict=True) if row[2]]
        for (prompt, _), a, b in both:
            at = first_difference(a, b)
            equal_tokens += len(a) if at is None else at
            if at is None:
                equal += 1
            else:
                comparable = at < min(len(a), len(b))
                gap = self.gap([*prompt, *a[:at]], a[at], b[at]) if comparable else NO_TIE
                widest = max(widest, gap if math.isfinite(gap) else NO_TIE)
        total = sum(len(a) for _, a, _ in both)
        return Agreement(len(both), equal, equal_tokens, total, widest)

    @torch.inference_mode()
    def gap(self, ids: Sequence[int], one: int, other: int) -> float:
        """Return the distance of the logits of two tokens after `ids`, in standard deviations of all logits."""
        row = self.model(torch.tensor([list(ids)], device=self._device), logits_to_keep=1).logits[0, -1].float()
        return float((row[one] - row[other]).abs() / row.std())

    def _answers(
        self, manager: Any, prompts: Sequence[tuple[Sequence[int], int]], deadline_s: float
    ) -> list[list[int]]:
        """Return the answers in order; an empty one: not answered within `deadline_s`."""
        ids = [manager.add_request(list(prompt), max_new_tokens=count) for prompt, count in prompts]
        found: dict[str, list[int]] = {}
        until_s = time.monotonic() + deadline_s
        while len(found) < len(ids) and (left_s := until_s - time.monotonic()) > 0:
            result = manager.get_result(timeout=min(1.0, left_s))
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"transformers failed a request: {result.error}")
                found[result.request_id] = list(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError(f"transformers has stopped; it answered {len(found)} of {len(ids)} requests")
        return [found.get(i, []) for i in ids]


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return where two answers differ; None: they are equal. A different length counts too."""
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
