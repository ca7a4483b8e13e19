"""Both ledgers keep the same account: Redis's script, and the ledger of one gateway alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.redis_client import connect
from router.tenants.ledger import SLOTS, Grant, Ledger, Report, fair_share
from router.tenants.local_ledger import LocalLedger
from router.tenants.redis_ledger import RedisLedger
from router.tenants.tenant import TenantLimits
from tests.redis_server import running_redis

LIMITS = TenantLimits(10, 100, 4)
ASKS = Report("t", LIMITS, 0, 0, 0, 0, 0, 0)
Made = tuple[Ledger, Callable[[float], None]]


@pytest.fixture(params=["local", "redis"])
async def made(request: pytest.FixtureRequest) -> AsyncIterator[Made]:
    """Yield a ledger, and a function that sets its clock, in seconds."""
    now = [1_000_000.25]

    def set_clock(now_s: float) -> None:
        now[0] = now_s

    if request.param == "local":
        yield LocalLedger(lambda: now[0]), set_clock
        return
    with running_redis() as server:
        async with connect(server.url) as redis:
            yield RedisLedger(redis, "g1", lambda: 1000 * now[0]), set_clock


async def settle(ledger: Ledger, **fields: Any) -> Grant:
    (grant,) = await ledger.settle([replace(ASKS, **fields)])
    return grant


async def test_what_is_wanted_is_held_as_far_as_there_is_some(made: Made) -> None:
    ledger, _ = made
    grant = await settle(ledger, requests_wanted=3, tokens_wanted=200, at_once_wanted=9)
    assert (grant.requests, grant.tokens, grant.at_once) == (3, 100, 4)
    assert (grant.requests_left, grant.tokens_left, grant.slots) == (7, 0, ())
    grant = await settle(ledger, requests_used=3, tokens_used=40, requests_wanted=9, tokens_wanted=10)
    assert (grant.requests, grant.tokens, grant.requests_left, grant.tokens_left) == (7, 10, 0, 50)


async def test_use_counts_for_a_minute_and_never_for_less(made: Made) -> None:
    ledger, set_clock = made
    await settle(ledger, requests_used=10, tokens_used=5)
    for later_s, free in ((30.0, 0), (59.99, 0), (60.0, 0), (60.75, 10)):
        set_clock(1_000_000.25 + later_s)
        grant = await settle(ledger, requests_wanted=10)
        assert grant.requests == free, later_s


async def test_slots_say_when_use_ends_to_count(made: Made) -> None:
    ledger, set_clock = made
    await settle(ledger, requests_used=2)
    set_clock(1_000_003.5)
    grant = await settle(ledger, requests_used=1, tokens_used=7)
    assert [(round(slot.frees_s, 3), slot.requests, slot.tokens) for slot in grant.slots] == [
        (SLOTS + 1 - 3.5, 2, 0),
        (SLOTS + 1 - 0.5, 1, 7),
    ]


async def test_corrections_give_back_what_was_charged_too_much(made: Made) -> None:
    ledger, _ = made
    await settle(ledger, tokens_used=130)
    assert (await settle(ledger, tokens_wanted=50)).tokens == 0
    assert (await settle(ledger, tokens_used=-90, tokens_wanted=80)).tokens == 60


async def test_no_limit_is_no_limit(made: Made) -> None:
    ledger, _ = made
    grant = await settle(
        ledger,
        limits=TenantLimits(),
        requests_used=10**9,
        requests_wanted=10**6,
        tokens_wanted=10**9,
        at_once_wanted=99,
    )
    assert (grant.requests, grant.tokens, grant.at_once) == (10**6, 10**9, 99)


async def test_tenants_do_not_meet(made: Made) -> None:
    ledger, _ = made
    used = replace(ASKS, requests_used=10)
    _, grant = await ledger.settle([used, replace(ASKS, tenant="u", requests_wanted=10)])
    assert grant.requests == 10


@given(st.integers(1, 50), st.lists(st.integers(0, 60), min_size=1, max_size=6))
def test_fair_shares_are_used_up_and_no_gateway_loses_to_one_that_has_more(limit: int, wanted: list[int]) -> None:
    shares = [fair_share(limit, wanted, want) for want in wanted]
    assert all(share <= want for share, want in zip(shares, wanted, strict=True))
    assert sum(shares) >= min(limit, sum(wanted))
    assert sum(shares) < min(limit, sum(wanted)) + len(wanted), "each share is rounded up by less than one"
    for share, want in zip(shares, wanted, strict=True):
        assert share == want or share == max(shares)


async def test_the_script_shares_requests_at_once_fairly() -> None:
    wanted = [1, 30, 30, 7]
    with running_redis() as server:
        async with connect(server.url) as redis:
            ledgers = [RedisLedger(redis, f"g{number}") for number in range(4)]
            for _ in range(2):
                grants = [
                    (await ledger.settle([replace(ASKS, limits=TenantLimits(None, None, 40), at_once_wanted=want)]))[0]
                    for ledger, want in zip(ledgers, wanted, strict=True)
                ]
    assert [grant.at_once for grant in grants] == [fair_share(40, wanted, want) for want in wanted]
    assert grants[-1].gateways == 4


async def test_a_script_that_redis_has_forgotten_is_loaded_again() -> None:
    with running_redis() as server:
        async with connect(server.url) as redis:
            ledger = RedisLedger(redis, "g1")
            await settle(ledger, requests_used=4)
            await redis.script_flush()
            assert (await settle(ledger, requests_wanted=10)).requests == 6
