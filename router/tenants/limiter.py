"""Tenants' limits, over all gateways. THE_FILE.md, "Limits", has the rules."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from engine.common.redis_client import REDIS_ERRORS, raise_if_cancelled
from engine.common.redis_loop import Outage
from engine.contract.errors import TooManyRequests
from router.tenants.ledger import PERIOD_S, WINDOW_S, Grant, Ledger, Report
from router.tenants.local_ledger import LocalLedger
from router.tenants.quota import Quota, Reason
from router.tenants.tenant import Tenant, TenantLimits

log = logging.getLogger(__name__)

ASK_S = 1.0
"""How long a request may wait for the shared ledger; then this gateway's own ledger decides."""
RETRY_S = 1.0
"""Seconds between two checks whether a shared ledger that failed answers again."""
MAX_ROUNDS = 4
"""Most answers of the ledger that one request waits for: other requests may take what was granted for it."""
BATCH = 100
"""Tenants in one call, so that it takes about a millisecond of Redis's time."""


_HEADERS = [
    tuple(f"x-ratelimit-{what}-{name}" for what in ("limit", "remaining", "reset")) for name in ("requests", "tokens")
]
_RESET = f"{WINDOW_S:.0f}s"


class SharedLedger(Ledger, Protocol):
    """A ledger that other gateways use too, and that may fail: then both methods raise one of REDIS_ERRORS."""

    async def begin_anew(self) -> None:
        """Check after an error whether the ledger answers again."""
        ...


class RateLimited(TooManyRequests):
    """429: the tenant is at one of its limits. `headers`: its limits, in the headers of OpenAI's API."""

    def __init__(self, reason: Reason, limit: int, wait_s: float, tokens: int, headers: Mapping[str, str]) -> None:
        """`wait_s`: seconds until there is room; infinite if there never will be."""
        per = {"requests": "requests a minute", "tokens": "tokens a minute", "at_once": "requests at once"}[reason]
        retry_after_s = max(0.0, wait_s) if math.isfinite(wait_s) else None
        if retry_after_s is None:
            text = f"this request may take {tokens} tokens, and the limit is {limit} {per}: send less in one request"
        elif reason == "at_once":
            text = f"the limit of {limit} {per} is reached: wait for a request to end"
        else:
            text = f"the limit of {limit} {per} is reached: try again in {retry_after_s:.0f} s"
        super().__init__(text, code="rate_limit_exceeded", retry_after_s=retry_after_s)
        self.reason = reason
        self.headers = headers


class Taking:
    """`async with limiter.take(tenant) as taking:` is one request. Entering raises RateLimited."""

    __slots__ = ("_limiter", "_on_wait", "_quota", "_tokens", "used")

    def __init__(self, limiter: Limiter, quota: Quota | None, tokens: int, on_wait: Callable[[], None]) -> None:
        self._limiter = limiter
        self._quota = quota
        self._tokens = tokens
        self._on_wait = on_wait
        self.used: int | None = None
        """Tokens that it took, once known; None: the estimate stays charged."""

    async def __aenter__(self) -> Taking:
        quota = self._quota
        if quota is not None and not quota.take(self._tokens):
            await self._limiter.ask_for(quota, self._tokens, 1, self._on_wait)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._quota is not None:
            self._quota.end(self._tokens, self.used)

    async def needs(self, tokens: int) -> None:
        """Charge `tokens` for the request in all. Raises RateLimited; then it stays charged as a request that took
        nothing."""
        quota, more = self._quota, tokens - self._tokens
        if quota is None or more <= 0:
            return
        quota.note_size(tokens)
        limit = quota.limits.tokens_per_minute
        if limit is not None and tokens > limit:
            raise self._limiter.refused(quota, "tokens", math.inf, tokens)
        if not quota.take(more, 0):
            await self._limiter.ask_for(quota, more, 0, self._on_wait)
        self._tokens = tokens

    def headers(self) -> dict[str, str]:
        """Return what the tenant has left, as headers of the answer."""
        return {} if self._quota is None else rate_headers(self._quota)


class Limiter:
    """The quotas of all tenants that have limits."""

    def __init__(self, shared: SharedLedger | None) -> None:
        """`shared`: the ledger of all gateways; None: each gateway keeps the limits by itself."""
        self._clock = asyncio.get_running_loop().time
        self._shared = shared
        self._local = LocalLedger(self._clock)
        self._quotas: dict[str, Quota] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._outage = Outage(
            log, "tenants' limits", "this gateway keeps its part of each limit by itself", level=logging.ERROR
        )
        self._gateways = 1
        self.is_alone = False
        """Whether the shared ledger fails, so that this gateway keeps its part of the limits by itself."""

    def use(self, tenants: Iterable[Tenant]) -> None:
        """Use these tenants, with their limits, from now on."""
        limits = {tenant.name: tenant.limits for tenant in tenants if tenant.limits is not None}
        for name, quota in list(self._quotas.items()):
            if name not in limits:
                del self._quotas[name]  # requests still running keep their old quota
            elif limits[name] != quota.limits:
                quota.change(limits[name])
        for name in limits.keys() - self._quotas.keys():
            self._quotas[name] = Quota(name, limits[name])
        self._local.keep(limits)

    def take(self, tenant: Tenant, tokens: int = 1, on_wait: Callable[[], None] = lambda: None) -> Taking:
        """Return a context that counts a request of `tenant`, which takes at least `tokens` tokens, while the block
        lasts. `Taking.needs` charges the rest once it is known.

        `on_wait` is called if the request has to wait for the ledger.
        """
        return Taking(self, self._quotas.get(tenant.name), tokens, on_wait)

    async def ask_for(self, quota: Quota, tokens: int, requests: int, on_wait: Callable[[], None]) -> None:
        """Take what is needed from what the ledger gives. `requests`: 0 for further tokens of a request. Raises
        RateLimited."""
        asked = max(tokens, quota.typical_tokens) if requests else tokens
        for _ in range(MAX_ROUNDS):
            if (refusal := quota.refusal(tokens, self._clock(), requests)) is not None:
                raise self.refused(quota, *refusal, tokens)
            on_wait()
            quota.wait_for(asked, 1, requests)
            try:
                await asyncio.shield(self._ask(quota))
            finally:
                quota.wait_for(asked, -1, requests)
            if quota.take(tokens, requests):
                return
        raise self.refused(quota, quota.lack(tokens, requests), PERIOD_S, tokens)

    def _ask(self, quota: Quota) -> asyncio.Task[None]:
        """Return a task to wait for: the report under way, though it does not include this request, or a new one."""
        return self._asking.get(quota.tenant) or self._begin([quota])

    def _begin(self, quotas: Sequence[Quota]) -> asyncio.Task[None]:
        """Report these quotas. None may have a report under way, because its use would be counted twice."""

        def end(_: asyncio.Task[None]) -> None:
            for quota in quotas:
                del self._asking[quota.tenant]

        asking = asyncio.create_task(self._settle(quotas))
        self._asking |= {quota.tenant: asking for quota in quotas}
        asking.add_done_callback(end)
        return asking

    def refused(self, quota: Quota, reason: Reason, wait_s: float, tokens: int) -> RateLimited:
        """Return the error of a request that has to wait for `wait_s` seconds, for ever if that is infinite."""
        limits = quota.limits
        limit = {
            "requests": limits.requests_per_minute,
            "tokens": limits.tokens_per_minute,
            "at_once": limits.requests_at_once,
        }[reason]
        return RateLimited(reason, limit or 0, wait_s, tokens, rate_headers(quota))

    async def run(self) -> None:
        """Report to the ledger every PERIOD_S, until cancelled; no failure of the ledger ends it."""
        retry_s = 0.0
        while True:
            raise_if_cancelled()
            await asyncio.sleep(PERIOD_S)
            active = [quota for quota in self._quotas.values() if quota.is_active]
            for quota in active:
                quota.end_period()
            for start in range(0, len(active), BATCH):
                free = [quota for quota in active[start : start + BATCH] if quota.tenant not in self._asking]
                if free:
                    # A report goes on if this is cancelled: the ledger may have counted it already.
                    await asyncio.shield(self._begin(free))
            if self.is_alone and self._clock() >= retry_s:
                await self._try_shared()
                retry_s = self._clock() + RETRY_S

    async def _try_shared(self) -> None:
        assert self._shared is not None
        try:
            async with asyncio.timeout(ASK_S):
                await self._shared.begin_anew()
        except REDIS_ERRORS as error:
            self._fails(error)
            return
        self.is_alone = False
        self._outage.succeeded()

    def _fails(self, error: BaseException) -> None:
        self.is_alone = True
        self._outage.failed(error)

    async def close(self) -> None:
        """Give back what is held."""
        if self._asking:  # what running reports tell must not be told again; each ends within ASK_S
            await asyncio.wait(set(self._asking.values()))
        if self._shared is None or self.is_alone:
            return
        reports = [quota.farewell() for quota in self._quotas.values() if quota.is_active]
        try:
            async with asyncio.timeout(ASK_S):
                await self._shared.settle(reports)
        except REDIS_ERRORS as error:
            log.debug("tenants' limits: this gateway's parts could not be given back: %s", error)

    async def _settle(self, quotas: Sequence[Quota]) -> None:
        reports = [quota.report() for quota in quotas]
        grants = await self._grants(reports)
        now_s = self._clock()
        for quota, report, grant in zip(quotas, reports, grants, strict=True):
            quota.settle(report, grant, now_s)

    async def _grants(self, reports: Sequence[Report]) -> list[Grant]:
        """Return the shared ledger's grants, or this gateway's own if that ledger fails."""
        if self._shared is None:
            return await self._local.settle(reports)
        if reports and not self.is_alone:
            try:
                async with asyncio.timeout(ASK_S):
                    grants = await self._shared.settle(reports)
            except REDIS_ERRORS as error:
                self._fails(error)
            else:
                self._local.record(reports)
                self._gateways = max(grant.gateways for grant in grants)
                return grants
        parts = [replace(report, limits=part(report.limits, self._gateways)) for report in reports]
        return await self._local.settle(parts)


def part(limits: TenantLimits, gateways: int) -> TenantLimits:
    """Return one gateway's part of the limits, at least one of each."""

    def one(limit: int | None) -> int | None:
        return None if limit is None else max(1, limit // gateways)

    return TenantLimits(one(limits.requests_per_minute), one(limits.tokens_per_minute), one(limits.requests_at_once))


def rate_headers(quota: Quota) -> dict[str, str]:
    """Return the `x-ratelimit-*` headers of OpenAI's API: https://platform.openai.com/docs/guides/rate-limits.

    The window slides, so the whole limit is available again WINDOW_S after the last use.
    """
    told = {}
    for (limit, remaining, reset), meter in zip(_HEADERS, (quota.requests, quota.tokens), strict=True):
        if meter.limit is not None:
            told[limit], told[remaining], told[reset] = str(meter.limit), str(meter.remaining()), _RESET
    return told
