"""Gateways agree on affinity groups: each writes its decayed traffic counters to Redis and merges the others'.

One Redis hash per model: gateway id -> JSON `[total, [[key, parent key or null, weight], ...]]`. Without Redis
a gateway's groups follow its own traffic alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from redis.asyncio import Redis

from engine.contract.keys import PrefixKey
from engine.contract.redis_client import REDIS_DEADLINE_S, REDIS_ERRORS, connect, raise_if_cancelled
from engine.contract.redis_keys import shares_key
from router.routing.shares import KeyWeight, ShareReport, TrafficShares

log = logging.getLogger(__name__)

SYNC_S = 1.0
FORGET_S = 60
"""A hash nobody has written for so long goes away."""


class ShareSync:
    """Keeps the counters of `shares()` (model -> counters of this gateway) in step with the other gateways'."""

    def __init__(self, redis_url: str, gateway_id: str, shares: Callable[[], Mapping[str, TrafficShares]]) -> None:
        self._redis_url = redis_url
        self._gateway_id = gateway_id
        self._shares = shares
        self._last_seen: dict[tuple[str, str], bytes] = {}

    async def run(self) -> None:
        """Exchange every SYNC_S seconds until cancelled; no Redis failure ends it."""
        async with connect(self._redis_url) as redis:
            while True:
                raise_if_cancelled()
                await asyncio.sleep(SYNC_S)
                for model, shares in self._shares().items():
                    try:
                        async with asyncio.timeout(2 * REDIS_DEADLINE_S):
                            await self._exchange(redis, model, shares)
                    except REDIS_ERRORS as error:
                        log.debug("traffic shares of %s are not exchanged: %s", model, error)

    async def _exchange(self, redis: Redis, model: str, shares: TrafficShares) -> None:
        now_s = asyncio.get_running_loop().time()
        key = shares_key(model)
        own = shares.export(now_s)
        async with redis.pipeline(transaction=False) as pipe:
            if own.total > 0:
                pipe.hset(key, self._gateway_id, encode_report(own))
                pipe.expire(key, FORGET_S)
            pipe.hgetall(key)
            *_, reports = await pipe.execute()
        for gateway, data in reports.items():
            name = gateway.decode(errors="replace")
            if name == self._gateway_id or self._last_seen.get((model, name)) == data:
                continue  # a gateway that is gone leaves its last report behind: counted once, it decays
            self._last_seen[model, name] = data
            report = decode_report(data)
            if report is not None:
                shares.merge(name, report, now_s)
        for model_and_name in [pair for pair in self._last_seen if pair[0] == model]:
            if model_and_name[1].encode() not in reports:
                del self._last_seen[model_and_name]


def encode_report(report: ShareReport) -> bytes:
    """The report as JSON."""
    return orjson.dumps([report.total, [[item.key, item.parent, item.weight] for item in report.keys]])


def decode_report(data: bytes) -> ShareReport | None:
    """The report in `data`, None where another version of the gateway wrote something else."""
    try:
        total, items = orjson.loads(data)
        keys = tuple(KeyWeight(PrefixKey(int(key)), _key(parent), float(weight)) for key, parent, weight in items)
        return ShareReport(keys, float(total))
    except (orjson.JSONDecodeError, TypeError, ValueError):
        return None


def _key(parent: Any) -> PrefixKey | None:
    return None if parent is None else PrefixKey(int(parent))
