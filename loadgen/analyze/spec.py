"""What an analysis is to work out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[str, float], None]
"""Called with what is being done and how much of it is (0 to 1)."""


@dataclass(frozen=True, slots=True)
class AnalysisSpec:
    """What to work out."""

    bytes_per_token: float = 4.0
    block_tokens: tuple[int, ...] = (16, 32, 64)
    """The first is the block size of the caches."""
    cache_tokens: tuple[int, ...] = ()
    """Of a pod; the recommendation is for the first."""
    pods: int = 1
    seed: int = 1
    write_cost: float = 1.01
    read_cost: float = 0.0
    memory_bytes: int = 1024 * 2**20
    trace_block_tokens: int | None = None
    """Tokens of a trace's block; None: worked out from its first lines."""

    @property
    def stride(self) -> int:
        """Bytes of a block."""
        return round(self.block_tokens[0] * self.bytes_per_token)
