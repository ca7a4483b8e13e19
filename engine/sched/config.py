"""The bounds of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of the scheduler. Raises ValueError naming the field that is out of range."""

    max_step_tokens: int
    """The most tokens that one step computes, prefill and decode together."""
    max_running: int
    """The most requests that hold KV blocks."""
    max_waiting: int
    """The most requests accepted beyond those."""
    max_overtakes: int = 64
    """A request is not overtaken again once this many younger requests have been admitted before it."""
    least_kept_tokens: int = 1
    """Tokens of the shortest beginning of a conversation that is kept unasked."""

    def __post_init__(self) -> None:
        for name in ("max_step_tokens", "max_running", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_overtakes < 0:
            raise ValueError(f"max_overtakes must not be negative, got {self.max_overtakes}")
        if self.max_step_tokens < self.max_running:
            raise ValueError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_running ({self.max_running}): "
                "every running request may decode a token in one step"
            )
