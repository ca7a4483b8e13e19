"""How the next token of a request is chosen. Ranges are those of the OpenAI API and of vLLM's extensions to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MIN_TEMPERATURE = 1e-5
"""Below this the most probable token is as good as certain, and float32 would divide by zero."""
MIN_REPETITION_PENALTY = 0.01
"""Below this, penalised logits leave the range in which float32 can tell them apart."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request. The engine checks the ranges when the request comes in; here they hold."""

    temperature: float = 1.0
    """0, or below `MIN_TEMPERATURE`: greedy, the most probable token (lowest id on a tie)."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose probability reaches this, in (0, 1]."""
    top_k: int = 0
    """Keep this many of the most probable tokens; 0: all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as probable as the most probable one, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output (CTRL, arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit per occurrence in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids before anything else."""
    min_tokens: int = 0
    """Output tokens before which none of the request's stop tokens is chosen."""
    seed: int = 0
    """The n-th output token depends on (seed, n) and the logits alone: not on the batch, not on preemption."""
    logprobs: int | None = None
    """Number of alternatives reported beside the chosen token's log-probability; None: report none at all."""

    @property
    def draws(self) -> bool:
        """Whether the token is drawn at random. Otherwise the most probable one is taken."""
        return self.temperature >= MIN_TEMPERATURE

    @property
    def reads_output(self) -> bool:
        """Whether choosing a token needs all tokens before it: a penalty and `min_tokens` count them."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.min_tokens > 0
        )
