"""What the writing and the reading side of a gateway's beliefs have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.registry.beliefs import BeliefSink
from router.registry.beliefs_others import Others
from router.registry.beliefs_own import Notebook
from router.registry.beliefs_plan import WritePlan
from router.registry.beliefs_wire import RedisClock


@dataclass(frozen=True, slots=True)
class SharedBeliefs:
    """One gateway's, for its `BeliefPublisher` and its `BeliefReader`."""

    notebook: Notebook
    sink: BeliefSink
    stride: int
    """Bytes per prefix key."""
    others: Others
    plan: WritePlan = field(default_factory=WritePlan)
    clock: RedisClock = field(default_factory=RedisClock)
    """Whichever side finds it old asks; where either loses its connection, both ask anew."""
