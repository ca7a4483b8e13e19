"""Requests that wait for the ledger, and a ledger that fails, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from router.tenants.ledger import PERIOD_S, Grant, Report
from router.tenants.limiter import ASK_S, RETRY_S, Limiter, RateLimited
from router.tenants.local_ledger import LocalLedger
from router.tenants.quota import Quota
from router.tenants.tenant import Tenant, TenantLimits

pytestmark = pytest.mark.looptime


class Scripted:
    """A shared ledger that has a real account and can be slow, silent or broken."""

    def __init__(self, gateways: int = 4) -> None:
        self.inner = LocalLedger(asyncio.get_running_loop().time)
        self.gateways = gateways
        self.delay_s = 0.01
        self.is_broken = False
        self.reports: list[Report] = []

    async def settle(self, reports: Sequence[Report]) -> list[Grant]:
        await self.begin_anew()
        self.reports += reports
        grants = await self.inner.settle(reports)
        return [
            Grant(
                **{name: getattr(grant, name) for name in Grant.__slots__ if name != "gateways"},
                gateways=self.gateways,
            )
            for grant in grants
        ]

    async def begin_anew(self) -> None:
        await asyncio.sleep(self.delay_s)
        if self.is_broken:
            raise RedisConnectionError("away")


def tenant(name: str = "t", **limits: int) -> Tenant:
    return Tenant(name, limits=TenantLimits(**limits))


@asynccontextmanager
async def running(shared: Scripted | None, *tenants: Tenant) -> AsyncIterator[Limiter]:
    limiter = Limiter(shared)
    limiter.use(tenants)
    task = asyncio.create_task(limiter.run())
    try:
        yield limiter
    finally:
        task.cancel()
        await asyncio.wait((task,))
        await limiter.close()


async def offer(limiter: Limiter, who: Tenant, count: int, tokens: int = 1) -> int:
    """Offer `count` requests at the same time, each of which ends at once. Return how many are admitted."""

    async def one() -> bool:
        try:
            async with limiter.take(who, tokens):
                return True
        except RateLimited:
            return False

    return sum(await asyncio.gather(*(one() for _ in range(count))))


async def test_a_burst_within_the_limit_is_let_in_whole() -> None:
    who = tenant(requests_per_minute=100)
    async with running(Scripted(), who) as limiter:
        started_s = asyncio.get_running_loop().time()
        assert await offer(limiter, who, 90) == 90
        assert asyncio.get_running_loop().time() - started_s < 0.1, "two answers of the ledger are enough"
        assert await offer(limiter, who, 90) == 10


async def test_what_is_held_is_spent_without_a_wait() -> None:
    who, shared = tenant(requests_per_minute=60_000), Scripted()
    shared.delay_s = 0.05
    async with running(shared, who) as limiter:
        for _ in range(100):
            await offer(limiter, who, 2)
            await asyncio.sleep(0.01)
        for _ in range(20):
            started_s = asyncio.get_running_loop().time()
            assert await offer(limiter, who, 2) == 2
            assert asyncio.get_running_loop().time() == started_s
            await asyncio.sleep(0.01)


async def test_the_limiter_tells_its_caller_that_it_waits_for_the_ledger() -> None:
    who, waits = tenant(requests_per_minute=100), []
    async with running(Scripted(), who) as limiter:
        for _ in range(2):
            async with limiter.take(who, 1, lambda: waits.append(1)):
                pass
        assert len(waits) == 2, "before a tenant's first requests nothing is reserved"
    async with running(None, tenant(requests_per_minute=1)) as limiter:
        async with limiter.take(who, 1):
            pass
        waits.clear()
        assert await offer(limiter, who, 1) == 0
        with pytest.raises(RateLimited):
            async with limiter.take(who, 1, lambda: waits.append(1)):
                pass
        assert not waits, "a refusal waits for nothing"


async def test_at_the_limit_requests_are_refused_without_asking_each_time() -> None:
    who, shared = tenant(requests_per_minute=10), Scripted()
    async with running(shared, who) as limiter:
        await offer(limiter, who, 20)
        asked = len(shared.reports)
        for _ in range(100):
            assert await offer(limiter, who, 5) == 0
            await asyncio.sleep(0.01)
        assert len(shared.reports) - asked <= 10, "each of the second's four periods has only a few reports"


async def test_every_use_is_told_once() -> None:
    who, shared = tenant(requests_per_minute=10_000, tokens_per_minute=10**6), Scripted()
    shared.delay_s = 0.1
    async with running(shared, who) as limiter:
        for _ in range(40):
            await offer(limiter, who, 3, tokens=7)
            await asyncio.sleep(0.03)
    assert sum(report.requests_used for report in shared.reports) == 120
    assert sum(report.tokens_used for report in shared.reports) == 840
    assert (shared.reports[-1].requests_wanted, shared.reports[-1].tokens_wanted) == (0, 0), "all is given back"


async def test_a_report_that_is_under_way_at_the_end_is_not_told_again() -> None:
    class Late(Scripted):
        """Counts a report at once, and answers it later."""

        async def settle(self, reports: Sequence[Report]) -> list[Grant]:
            grants = await super().settle(reports)
            await asyncio.sleep(0.1)
            return grants

    who, shared = tenant(requests_per_minute=10_000, tokens_per_minute=10**6), Late()
    async with running(shared, who) as limiter:
        assert await offer(limiter, who, 3, tokens=7) == 3
        await asyncio.sleep(PERIOD_S - 0.05)  # the report of these requests has arrived, its answer has not
        assert sum(report.requests_used for report in shared.reports) == 3
    assert sum(report.requests_used for report in shared.reports) == 3
    assert sum(report.tokens_used for report in shared.reports) == 21
    assert (shared.reports[-1].requests_wanted, shared.reports[-1].tokens_wanted) == (0, 0), "all is given back"


async def test_a_broken_ledger_leaves_each_gateway_its_part() -> None:
    who, shared = tenant(requests_per_minute=400), Scripted(gateways=4)
    async with running(shared, who) as limiter:
        assert await offer(limiter, who, 1) == 1
        shared.is_broken = True
        assert await offer(limiter, who, 400) == 99, "a quarter of the limit, less what it has used already"
        assert limiter.is_alone
        shared.is_broken = False
        await asyncio.sleep(RETRY_S + 1.0)
        assert not limiter.is_alone
        assert await offer(limiter, who, 400) >= 200


async def test_a_silent_ledger_is_waited_for_once() -> None:
    who, shared = tenant(requests_per_minute=400), Scripted()
    shared.delay_s = 1000.0
    clock = asyncio.get_running_loop().time
    async with running(shared, who) as limiter:
        started_s = clock()
        assert await offer(limiter, who, 100) == 100
        assert clock() - started_s == pytest.approx(ASK_S)
        for _ in range(50):
            started_s = clock()
            assert await offer(limiter, who, 1) == 1
            assert clock() == started_s
            await asyncio.sleep(0.1)


async def test_a_client_that_leaves_while_it_waits_takes_nothing() -> None:
    who, shared = tenant(requests_per_minute=10, requests_at_once=1), Scripted()
    async with running(shared, who) as limiter:
        waiting = [asyncio.create_task(offer(limiter, who, 1)) for _ in range(5)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        await asyncio.sleep(1.0)
        async with limiter.take(who, 1):
            pass
    assert sum(report.requests_used for report in shared.reports) == 1


async def test_places_at_once_are_given_back_at_a_requests_end() -> None:
    who = tenant(requests_at_once=2)
    async with running(Scripted(), who) as limiter:
        async with limiter.take(who, 1), limiter.take(who, 1):
            with pytest.raises(RateLimited, match="2 requests at once") as refused:
                async with limiter.take(who, 1):
                    pass
            assert refused.value.reason == "at_once"
        async with limiter.take(who, 1):
            pass


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"requests_per_minute": 40}, "requests"),
        ({"tokens_per_minute": 4000}, "tokens"),
        ({"requests_at_once": 40}, "at_once"),
    ],
)
async def test_a_request_that_others_always_overtake_is_told_which_limit_it_met(
    limits: dict[str, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Quota.take

    def overtaken(quota: Quota, tokens: int, requests: int = 1) -> bool:
        while take(quota, 90):
            pass
        return False

    monkeypatch.setattr(Quota, "take", overtaken)
    who = Tenant("t", limits=TenantLimits(**limits))
    async with running(Scripted(), who) as limiter:
        with pytest.raises(RateLimited) as refused:
            async with limiter.take(who, 90):
                pass
    assert refused.value.reason == reason


async def test_tokens_are_corrected_by_what_was_used() -> None:
    who = tenant(tokens_per_minute=1000)
    async with running(None, who) as limiter:
        async with limiter.take(who, 900) as taking:
            taking.used = 100
        await asyncio.sleep(1.0)
        assert await offer(limiter, who, 1, tokens=900) == 1
        await asyncio.sleep(1.0)
        with pytest.raises(RateLimited, match="1000 tokens a minute") as refused:
            async with limiter.take(who, 100):
                pass
        assert 50 <= (refused.value.retry_after_s or 0) <= 60
        with pytest.raises(RateLimited, match="send less in one request") as never:
            async with limiter.take(who, 1001):
                pass
        assert never.value.retry_after_s is None


async def test_other_limits_take_effect_while_requests_run() -> None:
    who, shared = tenant(requests_per_minute=5), Scripted()
    async with running(shared, who) as limiter:
        async with limiter.take(who, 1):
            assert await offer(limiter, who, 10) == 4
            limiter.use([tenant(requests_per_minute=20)])
            assert await offer(limiter, who, 30) == 15
            limiter.use([tenant(requests_at_once=1)])
            assert await offer(limiter, who, 1) == 0, "one runs already"
            limiter.use([Tenant("t")])
            assert await offer(limiter, who, 100) == 100
            limiter.use([])
        assert await offer(limiter, who, 10) == 10


@pytest.mark.parametrize(("before", "after"), [(10**6, 100), (100, 10**6), (100, None), (None, 100)])
def test_an_answer_to_a_report_under_other_limits_grants_nothing(before: int | None, after: int | None) -> None:
    quota = Quota("t", TenantLimits(tokens_per_minute=before))
    quota.wait_for(50, 1)
    report = quota.report()
    quota.change(TenantLimits(tokens_per_minute=after))
    quota.settle(report, Grant(0, 50_000, 0, 0, 10**6, 1, ()), 0.0)
    assert quota.take(1) == (after is None)
    assert quota.tokens.is_short is False
    report = quota.report()
    quota.settle(report, Grant(0, 50, 0, 0, 50, 1, ()), 1.0)
    assert quota.take(50)
    assert not quota.take(1) or after is None
