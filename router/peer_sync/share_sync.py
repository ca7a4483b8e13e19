"""Gateways agree on affinity groups, and on which pods each tries first. Each writes to Redis, as decayed counters, how
much it sends to pods, and merges the others' counters.

One Redis hash per model: gateway id -> JSON `[total, [[key, parent key or null, weight], ...], time, prefill seconds]`.
Without Redis a gateway's groups follow its own traffic alone, and it assumes that it is the only gateway. The time is
Redis's, in seconds, because no two other clocks agree. A gateway that is gone leaves its last report behind, under an
id that never comes back. Any gateway that finds a report FORGET_S old removes it. Gateways of the previous release
wrote no time: their reports count once they are seen to change, and are removed after FORGET_S without a change.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import orjson
from redis.asyncio import Redis

from engine.common.redis_client import REDIS_DEADLINE_S, REDIS_ERRORS, connect, drop_connections, raise_if_cancelled
from engine.contract.keys import PrefixKey
from engine.contract.redis_keys import shares_key
from router.routing.shares import KeyWeight, ShareReport

log = logging.getLogger(__name__)

SYNC_S = 1.0
FORGET_S = 60
"""Seconds until a report, or a whole hash, that nobody writes is removed."""

MAX_ITEMS = 65_536
"""Keys of one report."""
MAX_WEIGHT = 1e15
"""Bound of requests, tokens, and seconds since 1970: larger numbers are absurd."""


class Shares(Protocol):
    """Counters of one model that gateways exchange."""

    def export(self, now_s: float) -> ShareReport:
        """Return the counters of this gateway."""
        ...

    def merge(self, gateway_id: str, report: ShareReport, now_s: float) -> None:
        """Replace another gateway's counters by `report`, as of `now_s`."""
        ...


class ShareSync:
    """Keeps the counters of `shares()` (model -> counters of this gateway) in step with the other gateways'."""

    def __init__(self, redis_url: str, gateway_id: str, shares: Callable[[], Mapping[str, Shares]]) -> None:
        self._redis_url = redis_url
        self._gateway_id = gateway_id
        self._shares = shares
        self._last_seen: dict[tuple[str, str], tuple[bytes, float]] = {}
        """Model and gateway -> its last report, and when that report was first seen."""

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
                        await drop_connections(redis)

    async def _exchange(self, redis: Redis, model: str, shares: Shares) -> None:
        key = shares_key(model)
        seconds, microseconds = await redis.time()
        redis_s = seconds + microseconds / 1e6
        now_s = asyncio.get_running_loop().time()
        own = shares.export(now_s)
        async with redis.pipeline(transaction=False) as pipe:
            if own.total > 0 or own.prefill_s > 0:
                pipe.hset(key, self._gateway_id, encode_report(own, redis_s))
                pipe.expire(key, FORGET_S)
            pipe.hgetall(key)
            *_, reports = await pipe.execute()
        others = {gateway: data for gateway, data in reports.items() if gateway != self._gateway_id.encode()}
        gone = [
            gateway
            for gateway, data in others.items()
            if not self._read(model, gateway.decode(errors="replace"), data, shares, redis_s, now_s)
        ]
        if gone:
            await redis.hdel(key, *gone)  # a gateway that still runs writes again within SYNC_S
        names = {gateway.decode(errors="replace") for gateway in others.keys() - gone}
        for seen in [seen for seen in self._last_seen if seen[0] == model and seen[1] not in names]:
            del self._last_seen[seen]

    def _read(self, model: str, name: str, data: bytes, shares: Shares, redis_s: float, now_s: float) -> bool:
        """Count another gateway's report if it is new. Return whether that gateway may still run."""
        last = self._last_seen.get((model, name))
        if last is not None and last[0] == data:
            return now_s - last[1] <= FORGET_S
        self._last_seen[model, name] = data, now_s
        decoded = decode_report(data)
        if decoded is None:
            return True
        report, written_s = decoded
        if written_s is None:  # time not known; a gateway that runs changes its report within SYNC_S
            if last is not None:
                shares.merge(name, report, now_s)
            return True
        age_s = redis_s - written_s
        if abs(age_s) > FORGET_S:  # it is in the future if Redis has come back with another clock
            return False
        shares.merge(name, report, now_s - max(0.0, age_s))
        return True


def encode_report(report: ShareReport, written_s: float) -> bytes:
    """Return the report as JSON, with the time of its writing."""
    keys = [[item.key, item.parent, item.weight] for item in report.keys]
    return orjson.dumps([report.total, keys, written_s, report.prefill_s])


def decode_report(data: bytes) -> tuple[ShareReport, float | None] | None:
    """Return the report in `data` and when it was written (None: not said); None if it is no report known here."""
    try:
        total, items, *written = orjson.loads(data)
        if len(items) > MAX_ITEMS:
            return None
        keys = tuple(KeyWeight(_key(key), _parent(parent), _weight(weight)) for key, parent, weight in items)
        written_s, prefill_s = [*map(_weight, written), None, None][:2]
        return ShareReport(keys, _weight(total), prefill_s or 0.0), written_s
    except (ArithmeticError, TypeError, ValueError):
        return None


def _weight(number: Any) -> float:
    if not 0 <= (value := float(number)) <= MAX_WEIGHT:
        raise ValueError(f"{value} is not a weight")
    return value


def _key(number: Any) -> PrefixKey:
    if not 0 <= (key := int(number)) < 2**64:
        raise ValueError("it is not a prefix key")
    return PrefixKey(key)


def _parent(number: Any) -> PrefixKey | None:
    return None if number is None else _key(number)
