"""What the writing and the reading side of a gateway's beliefs share."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.peer_sync.beliefs import BeliefSink
from router.peer_sync.beliefs_others import Others
from router.peer_sync.beliefs_own import Notebook
from router.peer_sync.beliefs_plan import WritePlan
from router.peer_sync.beliefs_wire import RedisClock


@dataclass(frozen=True, slots=True)
class SharedBeliefs:
    """The shared objects of one gateway's `BeliefPublisher` and `BeliefReader`."""

    notebook: Notebook
    sink: BeliefSink
    stride: int
    """Bytes per prefix key."""
    others: Others
    plan: WritePlan = field(default_factory=WritePlan)
    clock: RedisClock = field(default_factory=RedisClock)
    """The side that finds the clock out of date asks Redis for the time. If either side loses its connection, both ask
    again."""
