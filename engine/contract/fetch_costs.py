"""The time to fetch KV from the tiers below an engine's pool. An engine with tiers sends it with every delta.

    u8 version (1) | u8 0 | u16 costs | f64 latency_s, f64 token_s of each: host, disk, shared

Little-endian. The bytes have their own field in the stream's entries. A reader that does not know the field ignores it.
A reader takes the costs of the tiers that it knows, and ignores those of a later version.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

VERSION = 1
MAX_LATENCY_S = 3600.0
MAX_FETCHED_TOKEN_S = 60.0
"""A cost with more seconds than this is absurd."""
LEAST_GAIN, LEAST_GAIN_S = 0.07, 0.002
"""The least gain of a fetch, as a share of the computing time and in seconds, because learnt step costs are inexact,
most of all those of short steps. Engines fetch nothing that gains less, and gateways apply the same rule."""
_HEAD = struct.Struct("<BBH")
_COST = struct.Struct("<dd")


@dataclass(frozen=True, slots=True)
class FetchCost:
    """The cost of one tier: fetching takes `latency_s + token_s * tokens`. `token_s` is 0 if there is no such tier or
    its speed is not known yet."""

    latency_s: float = 0.0
    """Seconds until the copies already queued have ended and a first block has passed the tiers above."""
    token_s: float = 0.0
    """Seconds for each token's KV on the slowest part of its way to the pool."""

    def seconds(self, tokens: float) -> float:
        """Return the seconds to fetch that many tokens."""
        return self.latency_s + self.token_s * tokens


@dataclass(frozen=True, slots=True)
class FetchCosts:
    """The costs of an engine's tiers, measured on the engine's own copies."""

    host: FetchCost = field(default_factory=FetchCost)
    disk: FetchCost = field(default_factory=FetchCost)
    shared: FetchCost = field(default_factory=FetchCost)


NO_FETCH_COSTS = FetchCosts()


def pack_fetch_costs(costs: FetchCosts) -> bytes:
    """Return the costs as bytes; no bytes if nothing is known."""
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
        # Written so that the condition is False for NaN.
        if not (0 <= latency_s <= MAX_LATENCY_S and 0 <= token_s <= MAX_FETCHED_TOKEN_S):
            raise ValueError(f"absurd fetch costs: {latency_s:g} s and {token_s:g} s a token")
    return FetchCosts(*[FetchCost(latency_s, token_s) for latency_s, token_s in known])


def is_worth_it(seconds: Any, other_s: Any) -> Any:
    """Return whether `seconds` is less than `other_s` by LEAST_GAIN and by LEAST_GAIN_S.

    Both may be numbers or arrays.
    """
    return (seconds <= other_s - LEAST_GAIN * other_s) & (seconds <= other_s - LEAST_GAIN_S)
