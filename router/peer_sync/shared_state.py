"""What the writing and the reading side of a gateway's beliefs share."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.peer_sync.messages import PeerSink
from router.peer_sync.outbox import Outbox
from router.peer_sync.peers import Peers
from router.peer_sync.wire import RedisClock
from router.peer_sync.write_plan import WritePlan


@dataclass(frozen=True, slots=True)
class SharedState:
    """The shared objects of one gateway's `PeerSender` and `PeerReader`."""

    outbox: Outbox
    sink: PeerSink
    stride: int
    """Bytes per prefix key."""
    others: Peers
    plan: WritePlan = field(default_factory=WritePlan)
    clock: RedisClock = field(default_factory=RedisClock)
    """The side that finds the clock out of date asks Redis for the time. If either side loses its connection, both ask
    again."""
