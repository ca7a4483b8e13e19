"""What bringing KV up from the tiers below an engine's pool takes, beside every delta of an engine that has tiers.

    u8 version (1) | u8 0 | u16 costs | f64 latency_s, f64 token_s of each: host, disk, shared

Little-endian. It is a field of its own in the stream's entries: readers that do not know it pass over it. A reader
takes the costs that it knows, and of a later version none.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

VERSION = 1
MAX_LATENCY_S = 3600.0
MAX_FETCHED_TOKEN_S = 60.0
"""Greater numbers are absurd."""
_HEAD = struct.Struct("<BBH")
_COST = struct.Struct("<dd")


@dataclass(frozen=True, slots=True)
class FetchCost:
    """Of one tier: fetching takes `latency_s + token_s * tokens`. `token_s` is 0 where there is no such tier, or its
    speed is not known yet."""

    latency_s: float = 0.0
    """Seconds until the copies asked for already have ended, and a first block has passed the tiers above."""
    token_s: float = 0.0
    """Seconds that each token's KV takes, on the slowest stretch of its way to the pool."""

    def seconds(self, tokens: float) -> float:
        """Of so many tokens."""
        return self.latency_s + self.token_s * tokens


@dataclass(frozen=True, slots=True)
class FetchCosts:
    """Of an engine's tiers, as measured by the engine's own copies."""

    host: FetchCost = field(default_factory=FetchCost)
    disk: FetchCost = field(default_factory=FetchCost)
    shared: FetchCost = field(default_factory=FetchCost)


NO_FETCH_COSTS = FetchCosts()


def pack_fetch_costs(costs: FetchCosts) -> bytes:
    """The costs as bytes; none where nothing is known."""
    if costs == NO_FETCH_COSTS:
        return b""
    listed = (costs.host, costs.disk, costs.shared)
    return _HEAD.pack(VERSION, 0, len(listed)) + b"".join(_COST.pack(c.latency_s, c.token_s) for c in listed)


def unpack_fetch_costs(data: bytes) -> FetchCosts:
    """The inverse of `pack_fetch_costs`. Raises ValueError on a wrong length and on absurd numbers."""
    if not data:
        return NO_FETCH_COSTS
    if data[0] != VERSION:
        return NO_FETCH_COSTS
    if len(data) < _HEAD.size:
        raise ValueError(f"fetch costs of {len(data)} bytes")
    _, _, count = _HEAD.unpack_from(data)
    if len(data) != _HEAD.size + count * _COST.size:
        raise ValueError(f"fetch costs of {len(data)} bytes, expected {_HEAD.size + count * _COST.size}")
    known = list(_COST.iter_unpack(data[_HEAD.size :]))[:3]
    for latency_s, token_s in known:
        # Written so that it is False for what is no number.
        if not (0 <= latency_s <= MAX_LATENCY_S and 0 <= token_s <= MAX_FETCHED_TOKEN_S):
            raise ValueError(f"absurd fetch costs: {latency_s:g} s and {token_s:g} s a token")
    return FetchCosts(*[FetchCost(latency_s, token_s) for latency_s, token_s in known])
