"""What goes wrong, and when."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loadgen.simulate.pod import PodSpec


class FaultKind(StrEnum):
    """What happens to a pod."""

    DIE = "die"
    """It is gone at once, with all it was doing."""
    JOIN = "join"
    """A new, cold pod becomes ready."""
    SLOW = "slow"
    """Its steps take 1 / speed of the time from here on."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One event. Raises ValueError naming what is missing."""

    at_s: float
    kind: FaultKind
    pod: str
    speed: float = 1.0
    """SLOW: new speed, 1 is the profile's."""
    spec: PodSpec | None = None
    """JOIN: the pod."""

    def __post_init__(self) -> None:
        if self.kind is FaultKind.JOIN and self.spec is None:
            raise ValueError(f"a pod that joins at {self.at_s:g} s needs a spec")
        if self.speed <= 0:
            raise ValueError(f"speed must be above 0, not {self.speed:g}")
