"""Keeps what a gateway has learnt in Redis, and has one that starts begin with it.

A hash with a field for each model, which whichever gateway has learnt something writes as a whole, so the last one
counts: all of them see the same pods, and each began with what those before it knew. No gateway leads, and none waits
for another. Without Redis each learns by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, Protocol

from redis.asyncio import Redis

from engine.contract.events import DecodeError
from engine.contract.redis_client import REDIS_ERRORS, connect, drop_connections, raise_if_cancelled
from engine.contract.redis_keys import LEARNT_KEY
from router.registry.learnt import Learnt, decode_learnt, encode_learnt

log = logging.getLogger(__name__)

WRITE_S = 5.0
"""Seconds between two looks at what was learnt since ..."""
FIRST_S = 0.5
"""... and of a gateway that has neither loaded nor written anything."""
KEPT_S = 3600
"""What nobody has written for so long goes away: the machine may do other things by then."""
DEADLINE_S = 1.0
"""To load, when the gateway starts, and to write, when it stops."""


class LearntSource(Protocol):
    """What a gateway has learnt."""

    def models(self) -> Iterable[str]:
        """Those that it serves."""

    def learnt(self, model: str) -> Learnt | None:
        """What answers taught of the model; None: nothing yet."""

    def expect(self, model: str, learnt: Learnt) -> None:
        """Others had learnt this of a model."""


class LearntSync:
    """Every failure of Redis is survived."""

    def __init__(self, redis_url: str, source: LearntSource) -> None:
        self._redis: Redis = connect(redis_url)
        self._source = source
        self._written: dict[str, Learnt] = {}

    async def load(self) -> None:
        """Begin with what others had learnt. Takes DEADLINE_S at most."""
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
        """Use the record of a model. False: nobody has written it for so long that it is void."""
        model = name.decode(errors="replace")
        try:
            learnt, written_s = decode_learnt(data)
        except DecodeError as error:
            log.warning("what other gateways have learnt of model %r is passed over: %s", model, error)
            return True
        if abs(now_s - written_s) > KEPT_S:
            return False
        self._source.expect(model, learnt)
        self._written[model] = learnt
        return True

    async def run(self) -> None:
        """Write what is news, until cancelled."""
        while True:
            raise_if_cancelled()
            await asyncio.sleep(WRITE_S if self._written else FIRST_S)
            await self._write()

    async def close(self) -> None:
        """Write the rest. Takes DEADLINE_S at most."""
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
