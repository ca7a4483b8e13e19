"""Gateways in virtual time that share limits through a real Redis. What each admits is recorded, with its time."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import redis

from engine.contract.redis_keys import quota_key
from router.tenants.ledger import PERIOD_S, WINDOW_S, Report
from router.tenants.quota import Quota
from router.tenants.redis_ledger import SCRIPT, RedisLedger, read_grant
from router.tenants.tenant import TenantLimits

STEP_S = 0.01
PERIOD_STEPS = round(PERIOD_S / STEP_S)


@dataclass
class Request:
    tokens: int
    """The tokens estimated at the request's admission."""
    used: int
    lasts_s: float = 0.0


@dataclass
class Gateway:
    """One gateway's quota. A report takes one step to Redis, and the answer one step back."""

    name: str
    quota: Quota
    ledger: RedisLedger
    phase: int
    asking: list[Any] | None = None
    is_due: bool = False
    is_dead: bool = False
    waiting: deque[Request] = field(default_factory=deque)
    running: list[tuple[float, int, Request]] = field(default_factory=list)
    """A heap of running requests: end, a number, request."""
    admitted: list[tuple[float, int]] = field(default_factory=list)
    """When each request was admitted, and the tokens that it used."""
    refused: int = 0
    most_at_once: int = 0


class Fleet:
    """Gateways, and a clock."""

    def __init__(self, client: redis.Redis, limits: TenantLimits, gateways: int, tenant: str = "t") -> None:
        self.now_s = 1_000_000.0
        self._client = client
        self._tenant = tenant
        self._sha = client.script_load(SCRIPT)
        self.gateways = [
            Gateway(
                f"g{number}",
                Quota(tenant, limits),
                RedisLedger(None, f"g{number}", lambda: 1000 * self.now_s),  # type: ignore[arg-type]
                7 * number,
            )
            for number in range(gateways)
        ]
        self._steps = 0

    @property
    def at_once(self) -> int:
        return sum(gateway.quota.in_flight for gateway in self.gateways if not gateway.is_dead)

    def run(self, seconds: float, arrivals: Callable[[float, int], list[Request]]) -> None:
        """Run for some time. `arrivals(now, number)` returns what comes to a gateway in this step."""
        for _ in range(round(seconds / STEP_S)):
            for number, gateway in enumerate(self.gateways):
                if not gateway.is_dead:
                    self._step(gateway, arrivals(self.now_s, number))
            self.now_s += STEP_S
            self._steps += 1

    def _step(self, gateway: Gateway, arriving: list[Request]) -> None:
        quota = gateway.quota
        if gateway.asking is not None:
            self._move(gateway)
        while gateway.running and gateway.running[0][0] <= self.now_s:
            *_, request = heapq.heappop(gateway.running)
            quota.end(request.tokens, request.used)
        if (self._steps + gateway.phase) % PERIOD_STEPS == 0 and quota.is_active:
            quota.end_period()
            gateway.is_due = True
        for request in arriving:
            self._offer(gateway, request)
        if gateway.asking is None and (gateway.is_due or gateway.waiting):
            gateway.asking, gateway.is_due = [quota.report()], False
        gateway.most_at_once = max(gateway.most_at_once, quota.in_flight)

    def _offer(self, gateway: Gateway, request: Request) -> None:
        if gateway.quota.take(request.tokens):
            self._admit(gateway, request)
        elif gateway.quota.refusal(request.tokens, self.now_s) is not None:
            gateway.refused += 1
        else:
            gateway.quota.wait_for(request.tokens, 1)
            gateway.waiting.append(request)

    def _admit(self, gateway: Gateway, request: Request) -> None:
        gateway.admitted.append((self.now_s, request.used))
        heapq.heappush(gateway.running, (self.now_s + request.lasts_s, len(gateway.admitted), request))

    def _move(self, gateway: Gateway) -> None:
        assert gateway.asking is not None
        report: Report = gateway.asking[0]
        if len(gateway.asking) == 1:
            reply = self._client.evalsha(self._sha, 1, quota_key(self._tenant), *gateway.ledger.arguments(report))
            gateway.asking.append(read_grant(reply))
            return
        gateway.quota.settle(report, gateway.asking[1], self.now_s)
        gateway.asking = None
        waited, gateway.waiting = gateway.waiting, deque()
        for request in waited:
            gateway.quota.wait_for(request.tokens, -1)
        for request in waited:
            self._offer(gateway, request)

    def most_in_a_window(self, *, tokens: bool = False) -> int:
        """Return the largest number of requests, or of tokens, that all gateways together admitted within WINDOW_S."""
        events = sorted(event for gateway in self.gateways for event in gateway.admitted)
        most = total = first = 0
        for when_s, used in events:
            total += used if tokens else 1
            while events[first][0] <= when_s - WINDOW_S:
                total -= events[first][1] if tokens else 1
                first += 1
            most = max(most, total)
        return most


def poisson(
    rate: float, seed: int, tokens: Callable[[random.Random], Request]
) -> Callable[[float, int], list[Request]]:
    """Return arrivals of `rate` requests a second at every gateway, each with its own stream."""
    rng = random.Random(seed)

    def arrive(now_s: float, number: int) -> list[Request]:
        made = []
        left = rate * STEP_S
        while left > 0:
            if rng.random() < min(1.0, left):
                made.append(tokens(rng))
            left -= 1.0
        return made

    return arrive
