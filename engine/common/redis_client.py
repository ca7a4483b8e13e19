"""The Redis client of engine and gateway: every call has a deadline, and it retries nothing by itself."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

REDIS_DEADLINE_S = 2.0
SENTINEL_PORT = 26379
REDIS_ERRORS = (RedisError, OSError, TimeoutError)
"""The errors that a call raises if Redis is unreachable, busy or broken."""


def connect(url: str) -> Redis:
    """Return a client for `url` (redis://, rediss:// or unix://, or see `_connect_by_sentinels`). Its first call
    connects."""
    retry: Retry = Retry(NoBackoff(), 0)
    waits: dict[str, Any] = {
        "socket_timeout": REDIS_DEADLINE_S,
        "socket_connect_timeout": REDIS_DEADLINE_S,
        "retry": retry,
    }
    if is_sentinel_url(url):
        return _connect_by_sentinels(url, waits)
    return Redis.from_url(url, **waits)


def is_sentinel_url(url: str) -> bool:
    """Return whether the URL names Sentinels instead of a server."""
    return url.startswith(("redis+sentinel://", "rediss+sentinel://"))


def _connect_by_sentinels(url: str, waits: dict[str, Any]) -> Redis:
    """Return a client for redis+sentinel://[USER:PASSWORD@]HOST[:26379][,HOST...]/NAME[/DB][?OPTIONS].

    It looks the master NAME up for each new connection. rediss+sentinel means TLS to Sentinels and master. User,
    password and options are the master's; `sentinel_username` and `sentinel_password` among the options are the
    Sentinels'. Raises ValueError.
    """
    scheme, _, rest = url.partition("+sentinel://")
    place, _, query = rest.partition("?")
    user, at, place = place.rpartition("@")
    if "/" in user:  # a later error would show the rest of the password
        raise ValueError("percent-encode the special characters of its password, a slash as %2F")
    hosts, _, path = place.partition("/")
    name, _, db = path.partition("/")
    if not name:
        raise ValueError("it must name the master after the Sentinels, as in redis+sentinel://HOST:26379/NAME")
    addresses = [_address(host) for host in hosts.split(",")]
    options = dict(parse_url(f"{scheme}://{user}{at}HOST/{db}?{query}"))
    options.pop("host", None)
    is_tls = options.pop("connection_class", None) is not None
    of_sentinels = {
        key.removeprefix("sentinel_"): options.pop(key)
        for key in ("sentinel_username", "sentinel_password")
        if key in options
    }
    tls = {"ssl": True, **{key: value for key, value in options.items() if key.startswith("ssl_")}} if is_tls else {}
    make: Any = Sentinel  # redis-py has no types for it
    sentinel = make(addresses, sentinel_kwargs={**waits, **of_sentinels, **tls}, **waits, **options)
    client: Redis = sentinel.master_for(name, connection_pool_class=_MasterPool, **({"ssl": True} if is_tls else {}))
    return client


class _MasterPool(SentinelConnectionPool):
    """Closes its connections to the Sentinels after each look-up. Each new connection needs one look-up."""

    async def get_master_address(self) -> tuple[str, int]:
        """See SentinelConnectionPool."""
        look_up: Any = super().get_master_address  # redis-py has no types for it
        try:
            host, port = await look_up()
            return host, port
        finally:
            for client in self.sentinel_manager.sentinels:
                await client.connection_pool.disconnect()


def _address(host: str) -> tuple[str, int]:
    parts = urlsplit(f"redis://{host}")
    if not parts.hostname or parts.path or parts.port == 0:
        raise ValueError(f"{host!r} is not the address of a Sentinel, such as HOST or HOST:26379")
    return parts.hostname, parts.port or SENTINEL_PORT


async def drop_connections(redis: Redis) -> None:
    """Close the client's connections, so that its next call looks the address up again.

    Call it after an error: an old connection may lead to a server that was demoted to a replica.
    """
    with suppress(*REDIS_ERRORS):
        await redis.connection_pool.disconnect()


def raise_if_cancelled() -> None:
    """Raise CancelledError if the current task was cancelled but the cancellation was swallowed.

    redis-py 8.1 swallows a cancellation during the handshake of a new connection, so a loop around it would never end.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
