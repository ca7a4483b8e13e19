"""The Redis client of engine and gateway: every call has a deadline, nothing is retried behind the caller's back."""

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
"""What a call to a Redis that is away, busy or broken raises."""
_ERRORS_TOLD = 8


def connect(url: str) -> Redis:
    """A client for `url` (redis://, rediss:// or unix://, or as `connect_by_sentinels` has it). Connects at its first
    call."""
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
    """Whether the URL names Sentinels instead of a server."""
    return url.startswith(("redis+sentinel://", "rediss+sentinel://"))


def _connect_by_sentinels(url: str, waits: dict[str, Any]) -> Redis:
    """redis+sentinel://[USER:PASSWORD@]HOST[:26379][,HOST...]/NAME[/DB][?OPTIONS]: the master of that name, looked
    up anew for each connection; rediss+sentinel: with TLS, to Sentinels and master alike.

    User, password and options are the master's; `sentinel_username` and `sentinel_password` among the options are the
    Sentinels'. Raises ValueError.
    """
    scheme, _, rest = url.partition("+sentinel://")
    place, _, query = rest.partition("?")
    user, at, place = place.rpartition("@")
    if "/" in user:  # an error further on would show what stands behind it
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
    make: Any = Sentinel  # whose types are not told
    sentinel = make(addresses, sentinel_kwargs={**waits, **of_sentinels, **tls}, **waits, **options)
    client: Redis = sentinel.master_for(name, connection_pool_class=_MasterPool, **({"ssl": True} if is_tls else {}))
    return client


class _MasterPool(SentinelConnectionPool):
    """Keeps no connection to a Sentinel open between two look-ups, of which each new connection needs one."""

    async def get_master_address(self) -> tuple[str, int]:
        """See SentinelConnectionPool."""
        look_up: Any = super().get_master_address  # whose types are not told
        try:
            host, port = await look_up()
            return host, port
        finally:
            for client in self.sentinel_manager.sentinels:
                await client.connection_pool.disconnect()


def _address(host: str) -> tuple[str, int]:
    parts = urlsplit(f"redis://{host}")
    if not parts.hostname or parts.path or parts.port == 0:
        raise ValueError(f"{host!r} is no address of a Sentinel, as HOST or HOST:26379 is")
    return parts.hostname, parts.port or SENTINEL_PORT


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
