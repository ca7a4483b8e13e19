"""What the scheduler and the backend exchange: one step's work, and its outcome.

Objects made for every token are never changed once they are handed over. They are not frozen, because making a frozen
object takes several times as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.sched.request import Request

PENDING = -1
"""Stands for the token that the previous step, still in progress, samples for the same request."""


@dataclass(slots=True)
class SequenceChunk:
    """Consecutive tokens of one request that a step computes: a piece of its prefill, or one decode token."""

    request: Request
    """Read-only for the backend. With two steps in flight its `output_tokens` may grow once `Backend.run` has begun."""
    start: int
    """Position of the first token. The KV before it is in the pool, or the previous step in progress writes it."""
    tokens: Sequence[int]
    """Token ids at positions start .. start + len(tokens) - 1; `PENDING` for a decode token not known yet."""
    blocks: Sequence[int]
    """Pool blocks of positions 0 .. start + len(tokens) - 1, in order; the last may be partly filled."""
    samples: bool
    """Whether the chunk ends at the request's last known token, so the step samples the next one."""
    decodes: bool
    """Whether this is a decode token: not part of the prompt, nor of a prefill repeated after preemption."""
    source: int | None = None
    """A block whose first `start % block_size` rows are copied into the block of position `start`, before the step
    writes anything. No step in progress writes those rows."""

    @property
    def output_index(self) -> int:
        """How many output tokens come before the token that the chunk samples. A seed's draw depends on it."""
        return self.start + len(self.tokens) - len(self.request.prompt_tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: chunks of distinct requests, never empty."""

    chunks: tuple[SequenceChunk, ...]


@dataclass(slots=True)
class SampledToken:
    """A chosen token. Log-probabilities are natural, of the model's own distribution (before any sampling filter)."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """(token, log-probability), most probable first, as many as the request asked for."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of a step."""

    sampled: Mapping[int, SampledToken] = field(default_factory=dict)
    """Request id -> next token, for each chunk with `samples`."""
    elapsed_s: float = 0.0
    """Time the step took on the device."""
