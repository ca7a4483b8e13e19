"""Who has used how much of a limit, and who holds how much of the rest: what gateways agree on.

A gateway takes a piece of what a tenant may use ahead of need, spends it by itself, and tells of it every PERIOD_S. So
a request costs a comparison, and no answer waits for Redis, but for a tenant's first after a pause.

Use is counted in SLOTS slots of a second and the one that has begun: a sliding window that is never too short. What
gateways hold counts as used while they are there; one that has not told for HOLD_S holds nothing any more.
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
    """What one gateway has used of a tenant's limits since its last report, and wants to hold from now on."""

    tenant: str
    limits: TenantLimits
    requests_used: int
    tokens_used: int
    """Below 0 where estimates are corrected."""
    requests_wanted: int
    tokens_wanted: int
    in_flight: int
    at_once_wanted: int


@dataclass(frozen=True, slots=True)
class Slot:
    """Use that a second made, and how long it counts on, in seconds."""

    frees_s: float
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Grant:
    """What the gateway holds from now on, and what that leaves. Of what is unlimited, all that was wanted."""

    requests: int
    tokens: int
    at_once: int
    requests_left: int
    """That no gateway holds."""
    tokens_left: int
    gateways: int
    """That have told of themselves within HOLD_S, this one included."""
    slots: tuple[Slot, ...]
    """Oldest first."""


class Ledger(Protocol):
    """Keeps account. `settle` raises one of REDIS_ERRORS where it cannot."""

    async def settle(self, reports: Sequence[Report]) -> list[Grant]:
        """Count what was used, and say what the gateway holds from now on, for each report."""
        ...


def fair_share(limit: int, wanted: Sequence[int], own: int) -> int:
    """The max-min fair share of one who wants `own`, among all that want `wanted`, rounded up.

    Who wants less than an equal share gets it, and the others share the rest equally. Bertsekas and Gallager, Data
    Networks, section 6.5.2.
    """
    rest = float(limit)
    for place, want in enumerate(sorted(wanted)):
        equal = rest / (len(wanted) - place)
        if want > equal:
            return min(own, -int(-equal // 1))
        rest -= want
    return own
