"""The Redis client of engine and gateway: every call has a deadline, nothing is retried behind the caller's back."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

REDIS_DEADLINE_S = 2.0
REDIS_ERRORS = (RedisError, OSError, TimeoutError)
"""What a call to a Redis that is away, busy or broken raises."""


def connect(url: str) -> Redis:
    """A client for `url` (redis://, rediss:// or unix://). Connects at its first call."""
    retry: Retry = Retry(NoBackoff(), 0)
    return Redis.from_url(url, socket_timeout=REDIS_DEADLINE_S, socket_connect_timeout=REDIS_DEADLINE_S, retry=retry)


def raise_if_cancelled() -> None:
    """Raise CancelledError where the current task has been cancelled but the cancellation was swallowed.

    redis-py 8.1 swallows one that arrives during the handshake of a new connection, so a loop around it would live on.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
