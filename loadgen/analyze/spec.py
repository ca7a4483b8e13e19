"""The settings of an analysis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[str, float], None]
"""Called with the name of the current step and its progress (0 to 1)."""


@dataclass(frozen=True, slots=True)
class AnalysisSpec:
    """The settings of an analysis."""

    bytes_per_token: float = 4.0
    block_tokens: tuple[int, ...] = (16, 32, 64)
    """The first entry is the block size of the caches."""
    cache_tokens: tuple[int, ...] = ()
    """Cache sizes of one pod; the recommendation is for the first."""
    pods: int = 1
    seed: int = 1
    write_cost: float = 1.01
    read_cost: float = 0.0
    memory_bytes: int = 1024 * 2**20
    trace_block_tokens: int | None = None
    """Tokens in a block of a trace; None: derived from its first lines."""

    @property
    def stride(self) -> int:
        """Return the length of a block in bytes."""
        return round(self.block_tokens[0] * self.bytes_per_token)
