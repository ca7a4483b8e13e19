"""What this gateway may still spend of a tenant's limits, decided without a wait. No clock, no Redis."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from router.tenants.ledger import PERIOD_S, WINDOW_S, Grant, Report, Slot
from router.tenants.tenant import TenantLimits

Reason = Literal["requests", "tokens", "at_once"]

AHEAD = 2.0
"""Periods of the recent use that are held in advance: one until the next report, one in case that comes late."""
MAX_AHEAD_SHARE = 0.05
"""Of a limit, in advance: so much of it at most lies with a gateway that has just had a burst."""
PACE_WEIGHT = 0.5
SPARE_AT_ONCE = 0.1
"""Requests at once beyond the most of the last period, as a share of those."""


@dataclass(slots=True)
class Meter:
    """Requests, or tokens, of one limit."""

    limit: int | None
    left: float = 0.0
    """Of what this gateway holds."""
    used: int = 0
    """Since the last report."""
    used_in_period: int = 0
    pace: float = 0.0
    """Use of a period, smoothed."""
    awaited: int = 0
    """What the requests need that wait for the next answer."""
    is_short: bool = False
    """Whether the last answer gave less than was wanted."""
    shared_left: int = 0
    """That no gateway held when the last answer was made."""

    def __post_init__(self) -> None:
        self.left = 0.0 if self.limit is not None else math.inf

    def spend(self, count: int) -> None:
        """Count it as used."""
        self.left -= count
        self.used += count
        self.used_in_period += count

    def wanted(self) -> int:
        """What is to be held from the next answer on."""
        if self.limit is None:
            return 0
        return self.awaited + int(min(AHEAD * self.pace, MAX_AHEAD_SHARE * self.limit))

    def give_back(self) -> None:
        """Spend no more of it than is wanted from now on: the others may have the rest."""
        if self.limit is not None:
            self.left = min(self.left, self.wanted())

    def end_period(self) -> None:
        """Learn the pace."""
        self.pace += PACE_WEIGHT * (max(0, self.used_in_period) - self.pace)
        self.used_in_period = 0

    def settle(self, reported: int, wanted: int, granted: int, shared_left: int) -> None:
        """An answer to a report of `reported`: what was used since then is used of what it grants."""
        self.used -= reported
        if self.limit is not None:
            self.left = granted - self.used
            self.is_short = granted < wanted
            self.shared_left = shared_left

    def change(self, limit: int | None) -> None:
        """Another limit from now on. What is held of the old one is not of the new one."""
        if limit != self.limit:
            self.limit, self.is_short = limit, False
            self.left = 0.0 if limit is not None else math.inf

    def remaining(self) -> int:
        """Of the limit, as far as it is known here."""
        return max(0, self.shared_left + int(self.left))


class Quota:
    """One tenant's."""

    def __init__(self, tenant: str, limits: TenantLimits) -> None:
        self.tenant = tenant
        self.requests = Meter(limits.requests_per_minute)
        self.tokens = Meter(limits.tokens_per_minute)
        self.limits = limits
        self.in_flight = 0
        self.cap = 0.0 if limits.requests_at_once is not None else math.inf
        self._awaited_at_once = 0
        self._most_in_flight = 0
        """In the period that has begun."""
        self._most_in_period = 0
        """In the one before."""
        self._is_at_once_short = False
        self._slots: tuple[Slot, ...] = ()
        self._settled_s = -math.inf

    @property
    def is_active(self) -> bool:
        """Whether there is something to tell, or to keep hold of."""
        return bool(
            self.in_flight
            or self.requests.used
            or self.tokens.used
            or self._held(self.requests)
            or self._held(self.tokens)
            or (self.limits.requests_at_once is not None and self.cap)
        )

    @staticmethod
    def _held(meter: Meter) -> bool:
        return meter.limit is not None and (meter.left > 0 or meter.pace >= 1)

    def take(self, tokens: int) -> bool:
        """Begin a request of so many tokens if what is held is enough for it."""
        if self.requests.left < 1 or self.tokens.left < tokens or self.in_flight >= self.cap:
            return False
        self.requests.spend(1)
        self.tokens.spend(tokens)
        self.in_flight += 1
        if self.in_flight > self._most_in_flight:
            self._most_in_flight = self.in_flight
        return True

    def end(self, charged: int, used: int | None) -> None:
        """End a request for which `charged` tokens were spent. `used`: what it took, where that is known."""
        self.in_flight -= 1
        if used is not None and used != charged:
            self.tokens.spend(used - charged)

    def wait_for(self, tokens: int, sign: int) -> None:
        """A request waits for the next answer (1), or does no more (-1)."""
        self.requests.awaited += sign
        self.tokens.awaited += sign * tokens
        self._awaited_at_once += sign

    def refusal(self, tokens: int, now_s: float) -> tuple[Reason, float] | None:
        """Why a request cannot begin, and in how many seconds it may; None: nothing speaks against asking for more.

        A period after an answer that was short of something there may be more again.
        """
        if self.limits.tokens_per_minute is not None and tokens > self.limits.tokens_per_minute:
            return "tokens", math.inf
        if now_s - self._settled_s >= PERIOD_S:
            return None
        age_s = now_s - self._settled_s
        if self.in_flight >= self.cap and self._is_at_once_short:
            return "at_once", 1.0
        if self.requests.left < 1 and self.requests.is_short:
            return "requests", self._frees_s("requests", 1 - self.requests.remaining()) - age_s
        if self.tokens.left < tokens and self.tokens.is_short:
            return "tokens", self._frees_s("tokens", tokens - self.tokens.remaining()) - age_s
        return None

    def _frees_s(self, kind: Literal["requests", "tokens"], missing: int) -> float:
        """Seconds from the last answer until so much counts no more."""
        for slot in self._slots:
            missing -= slot.requests if kind == "requests" else slot.tokens
            if missing <= 0:
                return slot.frees_s
        return WINDOW_S

    def end_period(self) -> None:
        """Learn from the last PERIOD_S how much is wanted in advance."""
        self.requests.end_period()
        self.tokens.end_period()
        self._most_in_period, self._most_in_flight = self._most_in_flight, self.in_flight

    def report(self) -> Report:
        """What is to be told."""
        at_once = max(self._most_in_period, self._most_in_flight)
        report = Report(
            tenant=self.tenant,
            limits=self.limits,
            requests_used=self.requests.used,
            tokens_used=self.tokens.used,
            requests_wanted=self.requests.wanted(),
            tokens_wanted=self.tokens.wanted(),
            in_flight=self.in_flight,
            at_once_wanted=0
            if self.limits.requests_at_once is None
            else max(self.in_flight, int(at_once * (1 + SPARE_AT_ONCE))) + self._awaited_at_once,
        )
        self.requests.give_back()
        self.tokens.give_back()
        if self.limits.requests_at_once is not None:
            self.cap = min(self.cap, report.at_once_wanted)
        return report

    def settle(self, report: Report, grant: Grant, now_s: float) -> None:
        """Take note of the answer to `report`."""
        self.requests.settle(report.requests_used, report.requests_wanted, grant.requests, grant.requests_left)
        self.tokens.settle(report.tokens_used, report.tokens_wanted, grant.tokens, grant.tokens_left)
        if report.limits == self.limits and self.limits.requests_at_once is not None:
            self.cap = grant.at_once
            self._is_at_once_short = grant.at_once < report.at_once_wanted
        self._slots = grant.slots
        self._settled_s = now_s

    def farewell(self) -> Report:
        """The last report: what was used, and that nothing is held any more."""
        return replace(self.report(), requests_wanted=0, tokens_wanted=0, in_flight=0, at_once_wanted=0)

    def change(self, limits: TenantLimits) -> None:
        """Other limits from now on."""
        self.requests.change(limits.requests_per_minute)
        self.tokens.change(limits.tokens_per_minute)
        if limits.requests_at_once != self.limits.requests_at_once:
            self.cap = 0.0 if limits.requests_at_once is not None else math.inf
        self.limits = limits
