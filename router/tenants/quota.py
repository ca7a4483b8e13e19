"""What this gateway may still spend of a tenant's limits, decided without waiting. No clock, no Redis."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from router.tenants.ledger import PERIOD_S, WINDOW_S, Grant, Report, Slot
from router.tenants.tenant import TenantLimits

Reason = Literal["requests", "tokens", "at_once"]

AHEAD = 2.0
"""Periods of recent use that are held in advance: one until the next report, one in case that report comes late."""
MAX_AHEAD_SHARE = 0.05
"""Largest share of a limit that is held in advance. It bounds what stays with a gateway that has just had a burst."""
PACE_WEIGHT = 0.5
TYPICAL_WEIGHT = 0.1
"""Weight of one request in what is known of the tokens of a tenant's requests."""
SPARE_AT_ONCE = 0.1
"""A gateway holds room for the most requests that it had at once in the last period, and for this share more."""


@dataclass(slots=True)
class Meter:
    """One limit of requests, or of tokens."""

    limit: int | None
    left: float = 0.0
    """What is left of what this gateway holds."""
    used: int = 0
    """Use since the last report."""
    used_in_period: int = 0
    pace: float = 0.0
    """Use per period, smoothed."""
    awaited: int = 0
    """What the requests that wait for the next answer need."""
    is_short: bool = False
    """Whether the last answer gave less than was wanted."""
    shared_left: int = 0
    """What no gateway held when the last answer was made."""

    def __post_init__(self) -> None:
        self.left = 0.0 if self.limit is not None else math.inf

    def spend(self, count: int) -> None:
        """Count `count` as used."""
        self.left -= count
        self.used += count
        self.used_in_period += count

    def wanted(self) -> int:
        """Return what should be held from the next answer on."""
        if self.limit is None:
            return 0
        return self.awaited + int(min(AHEAD * self.pace, MAX_AHEAD_SHARE * self.limit))

    def give_back(self) -> None:
        """Keep no more than `wanted`, so that others may have the rest."""
        if self.limit is not None:
            self.left = min(self.left, self.wanted())

    def end_period(self) -> None:
        """Update the pace at the end of a period."""
        self.pace += PACE_WEIGHT * (max(0, self.used_in_period) - self.pace)
        self.used_in_period = 0

    def settle(self, limit: int | None, reported: int, wanted: int, granted: int, shared_left: int) -> None:
        """Take an answer to a report of `reported`. What was used since then is subtracted from what it grants.

        If the limit was another one when the report was made, the answer grants nothing.
        """
        self.used -= reported
        if self.limit is not None and limit == self.limit:
            self.left = granted - self.used
            self.is_short = granted < wanted
            self.shared_left = shared_left

    def change(self, limit: int | None) -> None:
        """Use another limit from now on. What is held of the old limit does not count for the new one."""
        if limit != self.limit:
            self.limit, self.is_short = limit, False
            self.left = 0.0 if limit is not None else math.inf

    def remaining(self) -> int:
        """Return what is left of the limit, as far as this gateway knows."""
        return max(0, self.shared_left + int(self.left))


class Quota:
    """One tenant's quota in this gateway."""

    def __init__(self, tenant: str, limits: TenantLimits) -> None:
        self.tenant = tenant
        self.requests = Meter(limits.requests_per_minute)
        self.tokens = Meter(limits.tokens_per_minute)
        self.limits = limits
        self.in_flight = 0
        self.cap = 0.0 if limits.requests_at_once is not None else math.inf
        self._typical_tokens = 0.0
        self._awaited_at_once = 0
        self._most_in_flight = 0
        """The most in the present period."""
        self._most_in_period = 0
        """The most in the last period."""
        self._is_at_once_short = False
        self._slots: tuple[Slot, ...] = ()
        self._settled_s = -math.inf

    @property
    def is_active(self) -> bool:
        """Whether there is something to report, or something held."""
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

    def take(self, tokens: int, requests: int = 1) -> bool:
        """Begin a request of `tokens` tokens if what is held is enough. Return whether it has begun.

        `requests`: 0 for further tokens of a request that has begun.
        """
        if self.tokens.left < tokens or (requests and (self.requests.left < 1 or self.in_flight >= self.cap)):
            return False
        self.requests.spend(requests)
        self.tokens.spend(tokens)
        self.in_flight += requests
        if self.in_flight > self._most_in_flight:
            self._most_in_flight = self.in_flight
        return True

    def lack(self, tokens: int, requests: int = 1) -> Reason:
        """Return which limit keeps a request from beginning. `take` has just returned False for the request."""
        if requests and self.requests.left < 1:
            return "requests"
        return "tokens" if self.tokens.left < tokens else "at_once"

    def note_size(self, tokens: int) -> None:
        """Learn how many tokens this tenant's requests take, to ask for as many when the next one begins."""
        self._typical_tokens += TYPICAL_WEIGHT * (tokens - self._typical_tokens)

    def end(self, charged: int, used: int | None) -> None:
        """End a request that was charged `charged` tokens. `used`: what it took; None: not known."""
        self.in_flight -= 1
        if used is not None and used != charged:
            self.tokens.spend(used - charged)

    def wait_for(self, tokens: int, sign: int, requests: int = 1) -> None:
        """Note that a request begins (`sign` 1) or ceases (-1) to wait for the next answer."""
        self.requests.awaited += sign * requests
        self.tokens.awaited += sign * tokens
        self._awaited_at_once += sign * requests

    @property
    def typical_tokens(self) -> int:
        """Tokens that a request is likely to take, as far as the limit allows."""
        limit = self.limits.tokens_per_minute
        return 0 if limit is None else min(round(self._typical_tokens), limit)

    def refusal(self, tokens: int, now_s: float, requests: int = 1) -> tuple[Reason, float] | None:
        """Return why a request cannot begin, and the seconds until it may; None: the ledger may be asked for more.

        The ledger may be asked again one period after an answer that granted too little.
        """
        if self.limits.tokens_per_minute is not None and tokens > self.limits.tokens_per_minute:
            return "tokens", math.inf
        if now_s - self._settled_s >= PERIOD_S:
            return None
        age_s = now_s - self._settled_s
        if requests and self.in_flight >= self.cap and self._is_at_once_short:
            return "at_once", 1.0
        if requests and self.requests.left < 1 and self.requests.is_short:
            return "requests", self._frees_s("requests", 1 - self.requests.remaining()) - age_s
        if self.tokens.left < tokens and self.tokens.is_short:
            return "tokens", self._frees_s("tokens", tokens - self.tokens.remaining()) - age_s
        return None

    def _frees_s(self, kind: Literal["requests", "tokens"], missing: int) -> float:
        """Return the seconds from the last answer until at least `missing` of the past use has left the window."""
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
        """Return what is to be reported."""
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
        """Take the answer to `report`."""
        limits = report.limits
        self.requests.settle(
            limits.requests_per_minute,
            report.requests_used,
            report.requests_wanted,
            grant.requests,
            grant.requests_left,
        )
        self.tokens.settle(
            limits.tokens_per_minute, report.tokens_used, report.tokens_wanted, grant.tokens, grant.tokens_left
        )
        if limits.requests_at_once == self.limits.requests_at_once and self.limits.requests_at_once is not None:
            self.cap = grant.at_once
            self._is_at_once_short = grant.at_once < report.at_once_wanted
        self._slots = grant.slots
        self._settled_s = now_s

    def farewell(self) -> Report:
        """Return the last report: what was used, and that nothing is held from now on."""
        return replace(self.report(), requests_wanted=0, tokens_wanted=0, in_flight=0, at_once_wanted=0)

    def change(self, limits: TenantLimits) -> None:
        """Use other limits from now on."""
        self.requests.change(limits.requests_per_minute)
        self.tokens.change(limits.tokens_per_minute)
        if limits.requests_at_once != self.limits.requests_at_once:
            self.cap = 0.0 if limits.requests_at_once is not None else math.inf
        self.limits = limits
