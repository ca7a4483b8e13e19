"""Client connections: how many there may be, how long they may be idle or in a head, and clients that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import subprocess
import sys
from typing import Any

import orjson
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.common.sse import DONE
from engine.contract import headers
from router.edge import connection_limits
from router.startup.parts import CONNECTIONS, FLEET, LACKS
from tests.router.rig.helpers import ScriptedEngine, event, eventually, running, stalls_after, streams
from tests.router.rig.raw_client import GET_HEALTH, GET_MODELS, RawClient, connected, head

GOOD = streams([event("fine"), b"data: [DONE]\n\n"])
ASK = {"model": "m", "prompt": "x", "stream": True}


@pytest.mark.parametrize("is_trickling", [False, True])
async def test_a_head_that_does_not_end_is_a_408(is_trickling: bool) -> None:
    async def trickle(client: RawClient) -> None:
        with contextlib.suppress(ConnectionError):
            while is_trickling:
                client.send(b"a")
                await asyncio.sleep(0.02)

    async with running(ScriptedEngine("a", GOOD), head_timeout_s=0.2) as gateway, connected(gateway) as client:
        client.send(b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nX-Long: ")
        trickling = asyncio.create_task(trickle(client))
        answer = await client.answer()
        await client.closed()
        trickling.cancel()
        assert (answer.status, answer.error["type"]) == (408, "invalid_request_error")
        await eventually(lambda: gateway.app[CONNECTIONS].refused["head"] == 1)


async def test_the_second_head_of_a_connection_has_the_same_time() -> None:
    async with running(ScriptedEngine("a", GOOD), head_timeout_s=0.2) as gateway, connected(gateway) as client:
        client.send(GET_HEALTH)
        assert (await client.answer()).status == 200
        await asyncio.sleep(0.4)
        client.send(GET_HEALTH[:9])
        assert (await client.answer()).status == 408


async def test_a_request_may_take_longer_than_its_head() -> None:
    engine = ScriptedEngine("a", streams([event("a"), event("b"), DONE], gap_s=0.4))
    async with running(engine, head_timeout_s=0.1, keepalive_timeout_s=0.2) as gateway:
        answer = await gateway.post(ASK)
    assert (answer.status, answer.is_whole) == (200, True)


@pytest.mark.parametrize("first", [b"", GET_HEALTH])
async def test_a_connection_without_a_request_is_closed(first: bytes) -> None:
    async with running(ScriptedEngine("a", GOOD), keepalive_timeout_s=0.2) as gateway, connected(gateway) as client:
        client.send(first)
        await client.closed()
        await eventually(lambda: not gateway.app[CONNECTIONS].open)


async def test_while_every_connection_has_a_request_others_are_told_so_and_probes_are_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_limits, "EXTRA", 2)
    engine = ScriptedEngine("a", stalls_after([event("a")]))
    ask = head(b"Content-Length: %d" % len(orjson.dumps(ASK))) + orjson.dumps(ASK)
    async with contextlib.AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(running(engine, max_connections=3))
        inside = [await stack.enter_async_context(connected(gateway)) for _ in range(3)]
        for client in inside:
            client.send(ask)
        await eventually(lambda: engine.open == 3)
        async with connected(gateway) as refused:
            refused.send(GET_MODELS)
            answer = await refused.answer()
            assert await refused.closed() == b""
        async with connected(gateway) as probe:
            probe.send(GET_HEALTH)
            health = await probe.answer()
            assert await probe.closed() == b""
        await eventually(lambda: len(gateway.app[CONNECTIONS].open) == 3)
        inside[0].writer.transport.abort()
        await eventually(lambda: len(gateway.app[CONNECTIONS].open) == 2)
        async with connected(gateway) as fresh:
            fresh.send(GET_MODELS)
            assert (await fresh.answer()).status == 200
        for client in inside:
            client.writer.transport.abort()
        text = (await gateway.get("/metrics")).body.decode()
    assert (answer.status, answer.error["code"], health.status) == (503, "overloaded", 200)
    assert b"Retry-After: 1" in answer.head
    assert 'warmroute_gateway_connections_refused_total{reason="connections"} 1.0' in text


START = st.sampled_from([b"", b"\r\n", b"GET /v1/mod", b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nX: "])


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(START, st.booleans()), min_size=5, max_size=12))
def test_clients_that_have_no_request_keep_nobody_out(others: list[tuple[bytes, bool]]) -> None:
    """They send nothing, or a part of a head, before or after a request. Those with a request are never cut."""

    async def test() -> None:
        engine = ScriptedEngine("a", streams([event("a"), event("b"), DONE], gap_s=0.3))
        ask = head(b"Content-Length: %d" % len(orjson.dumps(ASK))) + orjson.dumps(ASK)
        async with contextlib.AsyncExitStack() as stack:
            gateway = await stack.enter_async_context(running(engine, max_connections=4))
            busy = await stack.enter_async_context(connected(gateway))
            busy.send(ask)
            await eventually(lambda: engine.open == 1)
            for start, asks_first in others:
                client = await stack.enter_async_context(connected(gateway))
                if asks_first:
                    client.send(GET_HEALTH)
                    assert (await client.answer()).status == 200
                client.send(start)
            for path in (GET_HEALTH, GET_MODELS):
                async with connected(gateway) as fresh:
                    fresh.send(path)
                    assert (await fresh.answer()).status == 200
            assert len(gateway.app[CONNECTIONS].open) <= 4
            text = (await busy.reader.readuntil(b"\r\n0\r\n\r\n")).decode()
            assert '"b"' in text

    asyncio.run(test())


class Talkative(ScriptedEngine):
    """An engine whose list of models has a given number of bytes."""

    def __init__(self, size: int) -> None:
        super().__init__("a", GOOD)
        self._about = "x" * size

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "about": self._about}]}, headers={headers.POD: "a"})


async def test_a_client_that_does_not_read_the_gateways_own_answer_is_cut() -> None:
    engine = Talkative(900_000)
    async with running(engine, idle_timeout_s=0.3) as gateway, connected(gateway, receive_bytes=4096) as client:
        for _ in range(20):  # several, because the kernel holds some of the answers
            client.send(GET_MODELS)
        await eventually(lambda: gateway.app[CONNECTIONS].refused["write"] == 1)
        await eventually(lambda: not gateway.app[CONNECTIONS].open)


async def test_a_client_that_does_not_read_the_end_of_the_last_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "CLOSING_S", 0.2)
    engine = Talkative(60_000)
    settings: dict[str, Any] = {"keepalive_timeout_s": 0.2, "idle_timeout_s": 0.3}
    async with running(engine, **settings) as gateway, connected(gateway, receive_bytes=4096) as client:
        for _ in range(20):
            client.send(GET_MODELS)
        await eventually(lambda: len(gateway.app[CONNECTIONS].open) == 1)
        (connection,) = gateway.app[CONNECTIONS].open
        await eventually(lambda: connection not in gateway.app[CONNECTIONS].open)


async def test_what_is_no_http_is_answered_in_the_apis_shape() -> None:
    async with running(ScriptedEngine("a", GOOD)) as gateway, connected(gateway) as client:
        client.send(b"GARBAGE \x01 sk-secret\r\n\r\n")
        answer = await client.answer()
        assert await client.closed() == b""
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
    assert "sk-secret" not in answer.body.decode()


LACKING = ("EMFILE", "ENFILE", "ENOBUFS", "ENOMEM", "EADDRNOTAVAIL")


@pytest.mark.parametrize("name", LACKING)
async def test_a_lack_of_our_own_ejects_no_engine_and_refuses_new_clients(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = getattr(errno, name)

    async def lacks(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, name)

    engine = ScriptedEngine("a", stalls_after([event("a")]))
    ask = head(b"Content-Length: %d" % len(orjson.dumps(ASK))) + orjson.dumps(ASK)
    async with contextlib.AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(running(engine, eject_after=1))
        clients = [await stack.enter_async_context(connected(gateway)) for _ in range(4)]
        client = clients.pop()
        client.send(GET_HEALTH)
        assert (await client.answer()).status == 200
        with monkeypatch.context() as patch:
            patch.setattr("aiohttp.connector.aiohappyeyeballs.start_connection", lacks)
            for one in clients:  # more clients than there are idle connections to the engine
                one.send(ask)
            await eventually(lambda: gateway.app[LACKS].counts[name] > 0)
            refused = await clients[-1].answer()
            async with connected(gateway) as fresh:
                fresh.send(GET_MODELS)
                told = await fresh.answer()
            client.send(GET_MODELS)
            assert (await client.answer()).status == 200
            await asyncio.sleep(0.3)  # probes cannot connect either
            assert len(gateway.app[FLEET].pods("m")) == 1
            (member,) = gateway.app[FLEET].members()
            assert member.admitted
        for one in clients:
            one.writer.transport.abort()
        engine.script = GOOD
        client.send(ask)
        assert b" 200 " in await client.reader.readline()
        client.writer.transport.abort()
        assert gateway.app[FLEET].ejections == 0
        text = (await gateway.get("/metrics")).body.decode()
    assert (refused.status, refused.error["code"]) == (503, "overloaded")
    assert told.status == 503
    assert f'warmroute_gateway_lacks_total{{error="{name}"}}' in text


def test_the_last_descriptors_are_not_given_to_clients() -> None:
    """The process has a real limit of descriptors. At the limit the gateway answers 503, unlike an event loop alone."""
    script = """
import asyncio, contextlib, os, resource, uvloop
from router.startup.parts import FLEET
from engine.common.sse import DONE
from tests.router.rig.helpers import ScriptedEngine, event, running, streams
from tests.router.rig.raw_client import GET_MODELS, connected
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))

async def main():
    engine = ScriptedEngine("a", streams([event("fine"), DONE]))
    async with running(engine) as gateway, contextlib.AsyncExitStack() as stack:
        held = []
        while len(os.listdir("/proc/self/fd")) < 190:
            held.append(os.dup(0))
        async with connected(gateway) as client:
            client.send(GET_MODELS)
            print((await client.answer()).status)
        for one in held:
            os.close(one)
        print("EMFILE" in (await gateway.get("/metrics")).body.decode(), len(gateway.app[FLEET].pods("m")))

uvloop.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["503", "True", "1"], done.stderr


def test_connections_are_cut_to_what_descriptors_allow(caplog: pytest.LogCaptureFixture) -> None:
    assert connection_limits.most_connections(100, 10_000) == 100
    assert not caplog.records
    assert connection_limits.most_connections(8192, 1024) == 448
    assert "at most 448 connections of clients may be open, not 8192" in caplog.text
