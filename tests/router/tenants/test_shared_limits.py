"""Four gateways share one limit through a real Redis. Together they admit no more than the limit, and hardly less."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from router.tenants.ledger import HOLD_S
from router.tenants.tenant import TenantLimits
from tests.redis_server import running_redis
from tests.router.tenants.fleet import Fleet, Request, poisson

MINUTES_S = 130.0
"""Seconds: two windows of a minute, and the beginning of a third."""


@pytest.fixture(scope="module")
def client() -> Iterator[redis.Redis]:
    with running_redis() as server, redis.Redis.from_url(server.url) as client:
        yield client


@pytest.fixture(autouse=True)
def empty(client: redis.Redis) -> None:
    client.flushall()


def one(rng: random.Random) -> Request:
    return Request(1, 1)


@pytest.mark.parametrize("limit", [10, 600])
def test_ten_times_the_limit_at_four_gateways_is_the_limit(client: redis.Redis, limit: int) -> None:
    fleet = Fleet(client, TenantLimits(limit), 4)
    fleet.run(MINUTES_S, poisson(10 * max(limit, 100) / 60 / 4, 1, one))
    assert fleet.most_in_a_window() == limit
    assert sum(len(gateway.admitted) for gateway in fleet.gateways) == 3 * limit, "the time spans three windows"


def test_a_busy_gateway_among_quiet_ones_gets_what_they_leave(client: redis.Redis) -> None:
    busy, quiet = poisson(100, 2, one), poisson(0.2, 3, one)
    fleet = Fleet(client, TenantLimits(600), 4)
    fleet.run(MINUTES_S, lambda now_s, number: (busy if number == 0 else quiet)(now_s, number))
    assert fleet.most_in_a_window() == 600
    assert sum(len(gateway.admitted) for gateway in fleet.gateways) == 3 * 600


def test_below_the_limit_nobody_is_refused(client: redis.Redis) -> None:
    fleet = Fleet(client, TenantLimits(6000), 4)
    fleet.run(30.0, poisson(20, 4, one))
    assert not any(gateway.refused for gateway in fleet.gateways)


def test_tokens_are_charged_by_estimate_and_corrected(client: redis.Redis) -> None:
    """Estimates are wrong by up to nine tenths either way, and corrected ten seconds later."""

    def guessed(rng: random.Random) -> Request:
        return Request(1000, rng.randint(100, 1900), rng.uniform(0.5, 10))

    fleet = Fleet(client, TenantLimits(tokens_per_minute=600_000), 4)
    fleet.run(75.0, poisson(15, 5, guessed))
    assert 0.95 * 600_000 <= fleet.most_in_a_window(tokens=True) <= 1.05 * 600_000


def test_what_was_charged_too_much_is_there_again(client: redis.Redis) -> None:
    fleet = Fleet(client, TenantLimits(tokens_per_minute=60_000), 4)
    fleet.run(30.0, poisson(25, 6, lambda rng: Request(1000, 100, 1.0)))
    assert 0.9 * 600 <= sum(len(gateway.admitted) for gateway in fleet.gateways) <= 600


@pytest.mark.parametrize("limit", [2, 8, 100])
def test_requests_at_once_are_never_more_and_hardly_less(client: redis.Redis, limit: int) -> None:
    fleet = Fleet(client, TenantLimits(requests_at_once=limit), 4)
    arrivals = poisson(2.0 * limit, 7, lambda rng: Request(1, 1, rng.uniform(0.5, 10)))
    seen = []
    for _ in range(300):
        fleet.run(0.1, arrivals)
        seen.append(fleet.at_once)
    assert max(seen) == limit
    assert sum(seen[100:]) / 200 >= 0.95 * limit
    if limit > 4:
        assert min(gateway.quota.in_flight for gateway in fleet.gateways) >= limit // 8, "each gateway has its share"


def test_a_dead_gateways_share_comes_back(client: redis.Redis) -> None:
    fleet = Fleet(client, TenantLimits(requests_at_once=20), 2)
    arrivals = poisson(20, 8, lambda rng: Request(1, 1, 3.0))
    fleet.run(5.0, lambda now_s, number: arrivals(now_s, number) if number == 0 else [])
    assert fleet.gateways[0].quota.in_flight == 20
    fleet.gateways[0].is_dead = True
    fleet.run(HOLD_S - 1.0, lambda now_s, number: arrivals(now_s, number) if number == 1 else [])
    assert not fleet.gateways[1].admitted
    fleet.run(5.0, lambda now_s, number: arrivals(now_s, number) if number == 1 else [])
    assert fleet.gateways[1].most_at_once == 20


def test_an_idle_tenant_holds_nothing(client: redis.Redis) -> None:
    fleet = Fleet(client, TenantLimits(600, 1_000_000, 50), 3)
    fleet.run(5.0, poisson(20, 9, lambda rng: Request(10, 12, 0.5)))
    fleet.run(10.0, lambda now_s, number: [])
    assert not any(gateway.quota.is_active for gateway in fleet.gateways)
    (key,) = client.keys()
    fields: Any = client.hkeys(key)
    assert not [field for field in fields if field.startswith(b"g")]
    assert 0 < client.pttl(key) <= 120_000


def test_a_refusal_says_when_there_is_room(client: redis.Redis) -> None:
    """The whole limit is used in its first second, so there is no room for the rest of the minute."""
    fleet = Fleet(client, TenantLimits(100), 1)
    fleet.run(1.0, poisson(1000, 10, one))
    quota = fleet.gateways[0].quota
    while (refused := quota.refusal(1, fleet.now_s)) is None:
        fleet.run(0.01, poisson(1000, 10, one))
    reason, wait_s = refused
    assert (reason, 58.0 <= wait_s <= 61.0) == ("requests", True)
    fleet.run(wait_s, lambda now_s, number: [])
    fleet.run(1.0, poisson(20, 11, one))
    assert len(fleet.gateways[0].admitted) > 100
