"""Ratios that the gateway learns for each model from answers, so it can estimate tokens without a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass

from router.registry.learnt import LearntTokens

PRIOR_TOKENS_PER_BYTE = 0.25
"""About four bytes of English per token, for common byte-level BPE vocabularies."""
PRIOR_WEIGHT_BYTES = 512.0
PRIOR_OUTPUT_TOKENS = 128.0
MEMORY = 0.99
"""Decay of the past at each answer: a memory of about a hundred answers."""
OUTPUT_WEIGHT = 0.05


@dataclass(slots=True)
class ModelEstimate:
    """Ratios of one model. `prompt_bytes` and `prompt_tokens` are decayed sums, so long prompts weigh more."""

    prompt_bytes: float = PRIOR_WEIGHT_BYTES
    prompt_tokens: float = PRIOR_WEIGHT_BYTES * PRIOR_TOKENS_PER_BYTE
    output_tokens: float = PRIOR_OUTPUT_TOKENS

    @property
    def tokens_per_byte(self) -> float:
        """Prompt tokens per canonical byte of text."""
        return self.prompt_tokens / self.prompt_bytes

    @property
    def learnt(self) -> LearntTokens | None:
        """The ratios learnt from answers; None before the first."""
        if self.prompt_bytes == PRIOR_WEIGHT_BYTES:
            return None
        return LearntTokens(self.prompt_bytes, self.prompt_tokens, self.output_tokens)

    def saw_prompt(self, canonical_bytes: int, tokens: int) -> None:
        """Learn from an answer that counts the tokens of a text prompt."""
        if canonical_bytes > 0 and tokens > 0:
            self.prompt_bytes = MEMORY * self.prompt_bytes + canonical_bytes
            self.prompt_tokens = MEMORY * self.prompt_tokens + tokens

    def saw_output(self, tokens: float) -> None:
        """Learn from an answer that ended after `tokens`."""
        self.output_tokens += OUTPUT_WEIGHT * (tokens - self.output_tokens)


class Estimates:
    """The estimates by model. Only models of the fleet enter, so the fleet bounds their number."""

    def __init__(self) -> None:
        self._models: dict[str, ModelEstimate] = {}

    def of(self, model: str) -> ModelEstimate:
        """Return the model's estimate, which begins with a prior."""
        estimate = self._models.get(model)
        if estimate is None:
            estimate = self._models[model] = ModelEstimate()
        return estimate

    def begin_with(self, model: str, learnt: LearntTokens) -> None:
        """Begin with what another gateway has learnt of a model, before this one has seen an answer of it."""
        self._models[model] = ModelEstimate(learnt.prompt_bytes, learnt.prompt_tokens, learnt.output_tokens)
