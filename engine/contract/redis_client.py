"""The Redis client of engine and gateway: every call has a deadline, nothing is retried behind the caller's back."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

REDIS_DEADLINE_S = 2.0
REDIS_ERRORS = (RedisError, OSError, TimeoutError)
"""What a call to a Redis that is away, busy or broken raises."""
_ERRORS_TOLD = 8


def connect(url: str) -> Redis:
    """A client for `url` (redis://, rediss:// or unix://). Connects at its first call."""
    retry: Retry = Retry(NoBackoff(), 0)
    return Redis.from_url(url, socket_timeout=REDIS_DEADLINE_S, socket_connect_timeout=REDIS_DEADLINE_S, retry=retry)


class Outage:
    """What to log while Redis cannot be used: each error once. One may hide another: away, then a wrong password."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def is_news(self, error: BaseException) -> bool:
        """Whether this outage has not had the error before. Of very many different ones the first are news."""
        text = str(error)
        if text in self._told or len(self._told) >= _ERRORS_TOLD:
            return False
        self._told.add(text)
        return True

    def end(self) -> None:
        """Redis works."""
        self._told.clear()


async def drop_connections(redis: Redis) -> None:
    """Close the client's connections: its next call looks the address up anew.

    After an error only: who stays on a connection keeps talking to a server that was demoted to a replica.
    """
    with suppress(*REDIS_ERRORS):
        await redis.connection_pool.disconnect()


def raise_if_cancelled() -> None:
    """Raise CancelledError where the current task has been cancelled but the cancellation was swallowed.

    redis-py 8.1 swallows one that arrives during the handshake of a new connection, so a loop around it would live on.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
