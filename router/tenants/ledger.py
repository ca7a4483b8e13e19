"""How much of a limit each gateway has used, and how much of the rest each holds: the account that gateways share.

A gateway takes a piece of a tenant's limit in advance, spends it by itself, and reports every PERIOD_S. So a request
costs a comparison, and no request waits for Redis, except a tenant's first after a pause.

Use is counted by the second: the window is the last SLOTS whole seconds and the one that has begun, so it is never too
short. What a gateway holds counts as used. After HOLD_S without a report, a gateway no longer holds anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from router.tenants.tenant import TenantLimits

SLOTS = 60
SLOT_S = 1.0
WINDOW_S = SLOTS * SLOT_S
"""Limits are per minute."""
PERIOD_S = 0.25
HOLD_S = 5.0


@dataclass(frozen=True, slots=True)
class Report:
    """What one gateway has used of a tenant's limits since its last report, and what it wants to hold from now on."""

    tenant: str
    limits: TenantLimits
    requests_used: int
    tokens_used: int
    """Below 0 if estimates are corrected."""
    requests_wanted: int
    tokens_wanted: int
    in_flight: int
    at_once_wanted: int


@dataclass(frozen=True, slots=True)
class Slot:
    """Use in one second, and for how many more seconds it counts."""

    frees_s: float
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Grant:
    """What the gateway holds from now on, and what is left. Without a limit, all that was wanted is granted."""

    requests: int
    tokens: int
    at_once: int
    requests_left: int
    """Requests that no gateway holds."""
    tokens_left: int
    gateways: int
    """Gateways that have reported within HOLD_S, this one included."""
    slots: tuple[Slot, ...]
    """Oldest first."""


class Ledger(Protocol):
    """Keeps the account. `settle` raises one of REDIS_ERRORS on failure."""

    async def settle(self, reports: Sequence[Report]) -> list[Grant]:
        """Count what was used, and return what the gateway holds from now on, for each report."""
        ...


def fair_share(limit: int, wanted: Sequence[int], own: int) -> int:
    """Return the max-min fair share of a gateway that wants `own`, among all that want `wanted`, rounded up.

    A gateway that wants less than an equal share gets it; the others share the rest equally. Bertsekas and Gallager,
    Data Networks, section 6.5.2.
    """
    rest = float(limit)
    for place, want in enumerate(sorted(wanted)):
        equal = rest / (len(wanted) - place)
        if want > equal:
            return min(own, -int(-equal // 1))
        rest -= want
    return own
