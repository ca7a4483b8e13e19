"""How often an engine publishes to the registry: for engines and for programs that imitate them."""

from __future__ import annotations

import math
from dataclasses import dataclass

BATCH_S = 0.05
"""Changed keys are published within this time, in a small fleet."""
LOAD_S = 0.1
"""A changed load is reported within this time, in a small fleet: with an older report an idle pod seems busy."""
HEARTBEAT_S = 0.5
"""Something is published at least this often, in a small fleet."""
SNAPSHOT_S = 5.0
"""A snapshot is written this often, in a small fleet, if anything was published since the last one."""
STREAM_ENTRIES = 20_000
"""Deltas kept per model, in a small fleet: some 15 s of 64 pods that publish every 50 ms."""

SMALL_FLEET = 64
"""Pods up to which the periods do not grow."""
LARGEST_FLEET = 100_000
"""Pods beyond which the periods no longer grow: a gateway that reports more is mistaken."""
LONGEST_BATCH_S = 1.0
LONGEST_HEARTBEAT_S = 1.5
"""Below the least pause between probes, 1.6 s by default: a gateway does not probe a pod that has just published."""
LONGEST_SNAPSHOT_S = 10.0
"""Below the 15 s of deltas that a gateway replays after a snapshot (`router/registry/reader.py`)."""


@dataclass(frozen=True, slots=True)
class Periods:
    """How often an engine in a fleet of some size publishes. All in seconds, except `stream_entries`."""

    batch_s: float = BATCH_S
    load_s: float = LOAD_S
    heartbeat_s: float = HEARTBEAT_S
    snapshot_s: float = SNAPSHOT_S
    renewal_s: float = 0.0
    """The first delta after this time renews the lease and checks for a gateway's request for a snapshot."""
    stream_entries: int = STREAM_ENTRIES


def periods(pods: int) -> Periods:
    """Return the periods of an engine in a fleet of `pods` engines.

    They grow with the square root of the fleet: a fleet 16 times as large as a small one publishes four times as much
    in all, and each of its engines a quarter as often. So the age of a gateway's data and the gateway's work grow more
    slowly than the fleet.
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
