"""An engine that is given by name is where the name leads now, even if the server of yesterday still answers."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from aiohttp import web

from engine.common.http import pool
from router.engines import engine_client
from router.fleet.probe import for_name
from tests.router.rig.helpers import DEADLINE_S, ScriptedEngine, answers, event, running, streams

NAME = "engine.test"
ASK = {"model": "m", "prompt": "x"}


class At(ScriptedEngine):
    """An engine at another address of the loopback, which keeps its connections for ever."""

    def __init__(self, address: str) -> None:
        super().__init__("pod", answers(200, b'{"at":"%b"}' % address.encode()))
        self.address = address
        self.probed: list[str] = []

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/{path:.*}", self._generate)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01, keepalive_timeout=3600.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.address, port).start()
        self.port = int(self._runner.addresses[0][1])
        self.url = f"http://{NAME}:{self.port}"

    async def _models(self, request: web.Request) -> web.Response:
        self.probed.append(request.headers.get("Connection", ""))
        return await super()._models(request)


@pytest.fixture
def leads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses to which the name leads. What is known of it is asked for often, and forgotten soon."""
    now = ["127.0.0.1"]
    look_up = socket.getaddrinfo

    def found(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if host != NAME:
            return look_up(host, port, *args, **kwargs)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, int(port))) for address in now]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    monkeypatch.setattr(pool, "RESOLVED_S", 0.05)
    monkeypatch.setattr(pool, "FORGOTTEN_S", 0.3)
    monkeypatch.setattr(engine_client, "KEEP_EVERY_S", 0.02)
    return now


async def test_requests_follow_a_name_though_the_old_connection_lives(leads: list[str]) -> None:
    old, new = At("127.0.0.1"), At("127.0.0.2")
    async with running(old) as gateway:
        await new.start(old.port)
        for _ in range(3):
            assert (await gateway.post(ASK)).json["at"] == "127.0.0.1"
        leads[:] = ["127.0.0.2", "127.0.0.1"]  # both count while the name has both
        await asyncio.sleep(0.5)
        leads[:] = ["127.0.0.2"]
        async with asyncio.timeout(DEADLINE_S):
            while (await gateway.post(ASK)).json["at"] != "127.0.0.2":  # noqa: ASYNC110 - each turn asks
                await asyncio.sleep(0.01)
        for _ in range(5):
            assert (await gateway.post(ASK)).json["at"] == "127.0.0.2"
        assert set(old.probed) == {"close"}, "else a probe would look at the old server for ever"
    await new.stop()


async def test_a_request_in_progress_is_not_cut(leads: list[str]) -> None:
    old = At("127.0.0.1")
    old.script = streams([event(str(i)) for i in range(40)] + [b"data: [DONE]\n\n"], gap_s=0.02)
    async with running(old) as gateway:
        asked = asyncio.create_task(gateway.post({**ASK, "stream": True}))
        await asyncio.sleep(0.1)
        leads[:] = ["127.0.0.9"]
        answer = await asked
        assert answer.is_whole
        assert answer.body.endswith(b"data: [DONE]\n\n")


async def test_a_name_that_cannot_be_resolved_keeps_its_connections(leads: list[str]) -> None:
    old = At("127.0.0.1")
    async with running(old, probe_interval_s=60.0) as gateway:
        assert (await gateway.post(ASK)).status == 200
        leads.clear()
        await asyncio.sleep(0.5)
        leads.append("127.0.0.1")
        assert (await gateway.post(ASK)).status == 200


@pytest.mark.parametrize("url", ["http://10.0.0.1:8000", "http://[::1]:8000", "https://[fe80::1%25eth0]:1"])
def test_addresses_keep_their_connections(url: str) -> None:
    assert not for_name(url)
    assert for_name("http://engine:8000") == {"Connection": "close"}
