"""Stores in Redis what a gateway has learnt, so that a gateway that starts can begin with it.

Redis has a hash with a field for each model. A gateway that has learnt something writes the field as a whole. The last
writer wins: all gateways see the same pods, and each began with what the earlier ones knew. No gateway leads, and none
waits for another. Without Redis each learns by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, Protocol

from redis.asyncio import Redis

from engine.common.redis_client import REDIS_ERRORS, connect, drop_connections, raise_if_cancelled
from engine.contract.events import DecodeError
from engine.contract.redis_keys import LEARNT_KEY
from router.registry.learnt import Learnt, decode_learnt, encode_learnt

log = logging.getLogger(__name__)

WRITE_S = 5.0
"""Seconds between two checks for something new to write ..."""
FIRST_S = 0.5
"""... and before the first one, if this gateway has neither loaded nor written anything."""
KEPT_S = 3600
"""Seconds until a record that nobody writes expires: the machines may do other things by then."""
DEADLINE_S = 1.0
"""Seconds for loading when the gateway starts, and for writing when it stops."""


class LearntSource(Protocol):
    """What a gateway has learnt."""

    def models(self) -> Iterable[str]:
        """Return the models that this gateway serves."""

    def learnt(self, model: str) -> Learnt | None:
        """Return what answers taught about the model; None: nothing yet."""

    def expect(self, model: str, learnt: Learnt) -> None:
        """Begin with what other gateways have learnt about a model."""


class LearntSync:
    """Loads and writes what a gateway has learnt. It survives every failure of Redis."""

    def __init__(self, redis_url: str, source: LearntSource) -> None:
        self._redis: Redis = connect(redis_url)
        self._source = source
        self._written: dict[str, Learnt] = {}

    async def load(self) -> None:
        """Begin with what other gateways have learnt. Takes DEADLINE_S at most, or twice that if old records are
        removed."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                seconds, _ = await self._redis.time()
                found: Any = await self._redis.hgetall(LEARNT_KEY)
        except REDIS_ERRORS as error:
            log.warning("what other gateways have learnt is not loaded: %s", error or type(error).__name__)
            await drop_connections(self._redis)
            return
        gone = [name for name, data in found.items() if not self._enter(name, data, seconds)]
        try:
            if gone:
                async with asyncio.timeout(DEADLINE_S):
                    await self._redis.hdel(LEARNT_KEY, *gone)
        except REDIS_ERRORS:
            await drop_connections(self._redis)  # the next gateway removes them

    def _enter(self, name: bytes, data: bytes, now_s: float) -> bool:
        """Use the record of a model. False: the record is too old."""
        model = name.decode(errors="replace")
        try:
            learnt, written_s = decode_learnt(data)
        except DecodeError as error:
            log.warning("what other gateways have learnt about model %r is skipped: %s", model, error)
            return True
        if abs(now_s - written_s) > KEPT_S:
            return False
        self._source.expect(model, learnt)
        self._written[model] = learnt
        return True

    async def run(self) -> None:
        """Write what is new, until cancelled."""
        while True:
            raise_if_cancelled()
            await asyncio.sleep(WRITE_S if self._written else FIRST_S)
            await self._write()

    async def close(self) -> None:
        """Write what is not written yet. Takes DEADLINE_S at most."""
        await self._write()
        await self._redis.aclose()

    async def _write(self) -> None:
        news: dict[str, Learnt] = {}
        for model in list(self._source.models()):
            learnt = self._source.learnt(model)
            if learnt is not None and learnt != self._written.get(model):
                news[model] = learnt
            await asyncio.sleep(0)  # requests go on between two models
        if not news:
            return
        try:
            async with asyncio.timeout(DEADLINE_S):
                seconds, _ = await self._redis.time()
                fields: Any = {model: encode_learnt(learnt, seconds) for model, learnt in news.items()}
                async with self._redis.pipeline(transaction=False) as pipe:
                    pipe.hset(LEARNT_KEY, mapping=fields)
                    pipe.expire(LEARNT_KEY, KEPT_S)
                    await pipe.execute()
        except REDIS_ERRORS as error:
            log.debug("what this gateway has learnt is not written: %s", error)
            await drop_connections(self._redis)
        else:
            self._written |= news
