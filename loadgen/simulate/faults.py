"""Faults of pods, and their times."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loadgen.simulate.pods.pod import PodSpec


class FaultKind(StrEnum):
    """What happens to a pod."""

    DIE = "die"
    """The pod is gone at once, with everything it was doing."""
    JOIN = "join"
    """A new, cold pod becomes ready."""
    SLOW = "slow"
    """From now on, a step of the pod takes the profile's time / speed."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One event. Raises ValueError, which names what is missing."""

    at_s: float
    kind: FaultKind
    pod: str
    speed: float = 1.0
    """SLOW: the new speed; 1 is the profile's."""
    spec: PodSpec | None = None
    """JOIN: the new pod."""

    def __post_init__(self) -> None:
        if self.kind is FaultKind.JOIN and self.spec is None:
            raise ValueError(f"a pod that joins at {self.at_s:g} s needs a spec")
        if self.speed <= 0:
            raise ValueError(f"speed must be above 0, not {self.speed:g}")
