"""Gateways of the version before and of this one, with one Redis: each passes over what it cannot read, and counts it.

`data/version_1.json` has bytes that the version before wrote.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from pathlib import Path
from typing import Any

import looptime
import pytest
import redis

from engine.contract.events import DecodeError, UnknownVersion
from engine.contract.events import decode as decode_report_of_engine
from engine.contract.keys import prefix_keys
from engine.contract.redis_keys import LEARNT_KEY, PEER_STREAM, assumed_key, shares_key
from router.peer_sync.codec import decode, encode
from router.peer_sync.messages import Life, PeerMessage
from router.peer_sync.shares import decode_report
from router.registry.learnt import decode_learnt
from router.views.types import PodId
from tests.redis_server import RedisServer
from tests.router.peer_sync.ends import End, ScriptedServer, ScriptedWire
from tests.router.peer_sync.test_gateways_share import SmallCache, ask, assumed, gateways, prompts, sharing
from tests.router.rig.helpers import eventually

BEFORE: dict[str, Any] = json.loads((Path(__file__).parent / "data/version_1.json").read_text())
POD = PodId("10.0.0.1:8000")
KEYS = prefix_keys(b"x" * 1024, 1)


def bytes_of(name: str) -> bytes:
    return base64.b64decode(BEFORE[name])


MESSAGES = [base64.b64decode(text) for text in BEFORE["messages"]]


@pytest.mark.parametrize("data", [*MESSAGES, bytes_of("assumed")])
def test_gateways_messages_of_the_version_before_are_told_apart_from_nonsense(data: bytes) -> None:
    with pytest.raises(UnknownVersion, match="version 1, expected 2: upgrade"):
        decode(data)


def test_the_version_before_tells_these_messages_apart_too() -> None:
    """It reads the first byte as the version, and knows 1."""
    assert encode(PeerMessage(Life(1), "", 1, 256))[0] == 2


@pytest.mark.parametrize("name", ["delta", "snapshot"])
def test_engines_of_the_version_before_are_read(name: str) -> None:
    message = decode_report_of_engine(bytes_of(name))
    assert (message.epoch, message.seq, message.stored[0]) == (3, 1, KEYS)


def test_values_of_the_version_before_are_read() -> None:
    learnt, written_s = decode_learnt(bytes_of("learnt"))
    assert (written_s, learnt.capacities[PodId("a")].told_tokens) == (1.8e9, 20_480)
    report, written_s = decode_report(bytes_of("shares"))
    assert (written_s, report.total, report.prefill_s) == (1.8e9, 2.0, 3.0)


def test_messages_of_the_version_before_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        server = ScriptedServer()
        end = End(1, [POD], (ScriptedWire(server), ScriptedWire(server)))
        await end.start()
        try:
            await asyncio.sleep(1.0)
            for data in MESSAGES * 3:
                await ScriptedWire(server).append(PEER_STREAM, {b"d": data}, oldest_s=0.0, kept_s=600.0)
                await asyncio.sleep(0.5)
            await asyncio.sleep(3.0)
            status = end.reader.status()
            assert (status.unknown, status.refused, status.gaps) == (3 * len(MESSAGES), 0, 0)
            assert "upgrade" in (status.last_error or "")
            assert status.connected
            assert not status.gateways
            assert not end.sink.keys(POD)
            assert not end.sink.in_flight
        finally:
            await end.kill()

    loop = looptime.new_event_loop(noop_cycles=1)
    try:
        with caplog.at_level(logging.ERROR):
            loop.run_until_complete(run())
    finally:
        loop.close()
    assert sum("upgrade" in record.getMessage() for record in caplog.records) == 1


async def test_two_gateways_share_beside_one_of_the_version_before(redis_server: RedisServer) -> None:
    """What it leaves in Redis, and goes on saying, costs them nothing but what it knows."""
    engines = [SmallCache(320) for _ in range(2)]
    with redis.Redis.from_url(redis_server.url) as client:
        now_s = float(client.time()[0])
        for data in MESSAGES:
            client.xadd(PEER_STREAM, {b"d": data})
        client.set(assumed_key("10.0.0.1:8000"), bytes_of("assumed"))
        client.hset(LEARNT_KEY, "m", bytes_of("learnt"))
        client.hset(shares_key("m"), "before", bytes_of("shares").replace(b"1800000000.0", str(now_s).encode()))
        async with gateways(redis_server, 2, *engines) as (first, second):
            for prompt in prompts(2, 12):
                client.xadd(PEER_STREAM, {b"d": MESSAGES[0]})
                await ask(first, prompt)
            await eventually(lambda: sharing(second).status().unknown > 0)
            assert sharing(second).status().refused == 0
            await eventually(lambda: assumed(second) == assumed(first))


def test_another_version_of_shares_is_refused() -> None:
    with pytest.raises(DecodeError, match="version 2"):
        decode_report(b"[1, [], 1, 0, 2]")
