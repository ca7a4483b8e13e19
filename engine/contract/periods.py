"""When an engine tells the registry of what changed: for the engine that does, and for those that imitate it."""

from __future__ import annotations

import math
from dataclasses import dataclass

BATCH_S = 0.05
"""Changed keys are published within this, in a small fleet."""
LOAD_S = 0.1
"""A load that has changed is reported within this, in a small fleet: an older one takes an idle pod for a busy one."""
HEARTBEAT_S = 0.5
"""Something is published at least this often, in a small fleet."""
SNAPSHOT_S = 5.0
"""A snapshot is written this often, in a small fleet, where anything was published since the last one."""
STREAM_ENTRIES = 20_000
"""Deltas kept per model, in a small fleet: some 15 s of 64 pods that publish every 50 ms."""

SMALL_FLEET = 64
"""Pods up to which nothing widens."""
LARGEST_FLEET = 100_000
"""Pods beyond which nothing widens any further: whoever says more is mistaken."""
LONGEST_BATCH_S = 1.0
LONGEST_HEARTBEAT_S = 1.5
"""Below the least pause between two probes, 1.6 s by default: a gateway does not probe whom it has just heard of."""
LONGEST_SNAPSHOT_S = 10.0
"""Below the 15 s of deltas that a gateway replays behind a snapshot (`router/registry/reader.py`)."""


@dataclass(frozen=True, slots=True)
class Periods:
    """How often an engine of a fleet of some size publishes. Seconds, but for `stream_entries`."""

    batch_s: float = BATCH_S
    load_s: float = LOAD_S
    heartbeat_s: float = HEARTBEAT_S
    snapshot_s: float = SNAPSHOT_S
    renewal_s: float = 0.0
    """The lease is renewed, and a gateway's wish for a snapshot looked for, with the first delta after this."""
    stream_entries: int = STREAM_ENTRIES


def periods(pods: int) -> Periods:
    """The periods of an engine among `pods` in all.

    They widen with the square root of the fleet: a fleet 16 times as large as a small one publishes four times as much
    in all, and each of its engines a quarter as often. So neither the age of what a gateway knows nor the
    work of following it grows with the fleet's size.
    """
    width = math.sqrt(max(1.0, min(pods, LARGEST_FLEET) / SMALL_FLEET))
    if width == 1.0:
        return Periods()
    batch_s = min(LONGEST_BATCH_S, BATCH_S * width)
    return Periods(
        batch_s=batch_s,
        load_s=max(LOAD_S, batch_s),
        heartbeat_s=min(LONGEST_HEARTBEAT_S, HEARTBEAT_S * width),
        snapshot_s=min(LONGEST_SNAPSHOT_S, SNAPSHOT_S * width),
        renewal_s=HEARTBEAT_S,
        stream_entries=int(STREAM_ENTRIES * width),
    )
