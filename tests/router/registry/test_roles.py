"""Engines and gateways connect as users of Redis that may do only what they need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.exceptions import NoPermissionError

from engine.common.redis_client import connect
from engine.contract.events import Tier
from engine.contract.prefix_key import PrefixKey
from engine.contract.redis_keys import (
    LEARNT_KEY,
    PEER_STREAM,
    assumed_key,
    resync_key,
    shares_key,
    snapshot_key,
    stream_key,
)
from engine.contract.redis_roles import ENGINE_RULES, GATEWAY_RULES
from router.peer_sync.keyed_values import KeyedValues
from router.peer_sync.shares import TrafficShareValues
from router.registry.learnt import Learnt, LearntCapacity
from router.registry.wire import RedisWire
from router.routing.prefill_shares import ModelShares
from router.routing.shares import TrafficShares
from router.tenants.ledger import Report
from router.tenants.redis_ledger import RedisLedger
from router.tenants.tenant import TenantLimits
from router.views.types import PodId
from tests.redis_server import RedisServer
from tests.router.peer_sync.test_learnt import Source
from tests.router.registry.ends import MODEL, FakeEngine, Gateway

RULES = {"engine": ENGINE_RULES, "gateway": GATEWAY_RULES}


class As:
    """The server as seen by one of its users."""

    def __init__(self, server: RedisServer, user: str) -> None:
        self.url = server.url.replace("unix://", f"unix://{user}:secret@")


@pytest.fixture
def users(redis_server: RedisServer) -> Iterator[RedisServer]:
    """Yield the server with both users; nobody else may do anything."""
    with redis.Redis.from_url(redis_server.url) as admin:
        for user, rules in RULES.items():
            admin.execute_command("ACL", "SETUSER", user, "reset", "on", ">secret", *rules.split())
        yield redis_server
        for user in RULES:
            admin.execute_command("ACL", "DELUSER", user)


async def test_what_an_engine_publishes_as_its_user_a_gateway_reads_as_its_own(users: RedisServer) -> None:
    engine_side: Any = As(users, "engine")
    gateway_side: Any = As(users, "gateway")
    engine = FakeEngine(engine_side, "a", epoch=1)
    async with engine.running(), Gateway(gateway_side).following(engine) as gateway:
        engine.change(dict.fromkeys(range(50), Tier.GPU))
        await gateway.wait_equal(engine)
        with redis.Redis.from_url(users.url) as admin:
            admin.delete(stream_key(MODEL))  # the gateway asks for a snapshot, and the engine hears it
        engine.change({99: Tier.HOST}, removed={1})
        await gateway.wait_equal(engine)
        assert gateway.reader.status().last_error is None


async def test_gateways_exchange_shares_as_their_user(users: RedisServer) -> None:
    shares = TrafficShares(half_life_s=60.0, limit=100, depth_strides=8)
    shares.record((PrefixKey(1), PrefixKey(2)), 3.0, 0.0)
    values = TrafficShareValues("one", lambda: {MODEL: ModelShares("one", shares)})
    exchange = KeyedValues(As(users, "gateway").url, values)
    await exchange.load()
    await exchange.close()
    async with connect(As(users, "gateway").url) as client:
        assert set(await client.hgetall(shares_key(MODEL))) == {b"one"}
        await client.hdel(shares_key(MODEL), "one")


async def test_gateways_tell_each_other_as_their_user(users: RedisServer) -> None:
    wire = RedisWire(As(users, "gateway").url)
    try:
        now_s = await wire.time()
        await wire.append(PEER_STREAM, {b"d": b"told"}, oldest_s=now_s - 45.0, kept_s=600.0)
        newest = await wire.newest(PEER_STREAM)
        entries: Any = [[newest, [b"d", b"told"]]]
        assert await wire.read({PEER_STREAM: b"0-0"}, 1) == [(PEER_STREAM, entries)]
        assert [page async for page in wire.range(PEER_STREAM, 0.0, newest)] == [entries]
        await wire.put(assumed_key("a"), b"assumed", 600.0)
        assert await wire.get([assumed_key("a"), assumed_key("b")]) == [b"assumed", None]
    finally:
        await wire.close()


async def test_gateways_keep_what_they_have_learnt_as_their_user(users: RedisServer) -> None:
    record, source = Learnt(capacities={PodId("a"): LearntCapacity(9.0, None)}), Source()
    await KeyedValues(As(users, "gateway").url, Source(m=record)).close()
    await (sync := KeyedValues(As(users, "gateway").url, source)).load()
    await sync.close()
    assert source.expected == {"m": record}


async def test_gateways_keep_account_of_limits_as_their_user(users: RedisServer) -> None:
    report = Report("t", TenantLimits(5), 3, 0, 9, 0, 0, 0)
    async with connect(As(users, "gateway").url) as client:
        (grant,) = await RedisLedger(client, "one").settle([report])
    assert grant.requests == 2


@pytest.mark.parametrize(
    ("user", "command"),
    [
        ("engine", ("EVAL", "return 1", "0")),
        ("engine", ("XREAD", "STREAMS", stream_key(MODEL), "0")),
        ("engine", ("GET", snapshot_key(MODEL, "b"))),
        ("engine", ("HGETALL", shares_key(MODEL))),
        ("engine", ("SET", shares_key(MODEL), "x")),
        ("engine", ("SET", "other", "x")),
        ("engine", ("XADD", PEER_STREAM, "*", "d", "a")),
        ("engine", ("SET", assumed_key("a"), "x")),
        ("engine", ("HSET", LEARNT_KEY, "m", "x")),
        ("gateway", ("XADD", "other", "*", "p", "a")),
        ("gateway", ("DEL", snapshot_key(MODEL, "a"))),
        ("gateway", ("GETDEL", resync_key(MODEL, "a"))),
        ("gateway", ("MGET", "other")),
        *((user, (command,)) for user in RULES for command in ("FLUSHALL", "SHUTDOWN", "ACL LIST", "CONFIG GET *")),
    ],
)
async def test_neither_may_do_what_it_need_not(user: str, command: tuple[str, ...], users: RedisServer) -> None:
    async with connect(As(users, user).url) as client:
        await client.ping()
        with pytest.raises(NoPermissionError):
            await client.execute_command(*" ".join(command).split())
