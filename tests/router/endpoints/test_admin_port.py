"""The operators' port: operators' views and actions have a port of their own, and each leaves an audit line."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import orjson
import pytest
from blockbuster import BlockBuster

from engine.common.audit import AUDIT
from router.edge import connection_limits
from router.edge.errors import OPERATORS_PATHS
from router.startup.parts import CONNECTIONS
from tests.router.rig.helpers import Gateway, ScriptedEngine, event, eventually, running, stalls_after, streams
from tests.router.rig.raw_client import connected

STREAM = {"model": "m", "prompt": "x" * 300, "stream": True}
GOOD = streams([event("a"), b"data: [DONE]\n\n"])
METHODS = {
    "/metrics": "GET",
    "/ui": "GET",
    "/v1/pods": "GET",
    "/v1/route/explain": "POST",
    "/reset_prefix_cache": "POST",
}


async def ask(gateway: Gateway, url: str, path: str, method: str | None = None) -> tuple[int, bytes]:
    async with gateway.session.request(method or METHODS[path], url + path, json=STREAM) as answer:
        return answer.status, await answer.read()


def records(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [orjson.loads(record.message)["audit"] for record in caplog.records if record.name == AUDIT]


async def test_clients_find_nothing_of_what_operators_have() -> None:
    engine = ScriptedEngine("a", GOOD)
    async with running(engine) as gateway:
        assert set(METHODS) == OPERATORS_PATHS
        for path in METHODS:
            status, body = await ask(gateway, gateway.url, path)
            told = orjson.loads(body)["error"]["message"]
            assert (status, told.endswith("; operators have a port of their own: --admin-port")) == (404, True)
        assert engine.resets == 0
        for path in METHODS:
            assert (await ask(gateway, gateway.admin_url, path))[0] == 200
        assert engine.resets == 1
        for path in ("/health", "/ready"):
            assert (await ask(gateway, gateway.url, path, "GET"))[0] == 200
            assert (await ask(gateway, gateway.admin_url, path, "GET"))[0] == 200
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/models"):
            assert (await ask(gateway, gateway.admin_url, path, "POST"))[0] == 404
    assert not engine.received


async def test_clients_keys_do_not_open_the_operators_port(tmp_path: Path, no_blocking_calls: BlockBuster) -> None:
    no_blocking_calls.deactivate()
    keys = tmp_path / "keys"
    keys.write_text("key\n")
    async with running(ScriptedEngine("a", GOOD), api_keys_file=str(keys)) as gateway:
        assert (await ask(gateway, gateway.url, "/v1/pods"))[0] == 401
        assert (await ask(gateway, gateway.admin_url, "/v1/pods"))[0] == 200


async def test_operators_are_served_while_clients_hold_every_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "EXTRA", 0)
    engine = ScriptedEngine("a", stalls_after([event("a")]))
    async with running(engine, max_connections=2) as gateway, contextlib.AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(connected(gateway))
        await eventually(lambda: len(gateway.app[CONNECTIONS].open) == 2)
        for path in METHODS:
            assert (await ask(gateway, gateway.admin_url, path))[0] == 200


async def test_every_action_of_an_operator_leaves_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, AUDIT)
    engines = [ScriptedEngine(name, GOOD) for name in "ab"]
    async with running(*engines) as gateway:
        for path in ("/metrics", "/health", "/ready"):
            await ask(gateway, gateway.admin_url, path, "GET")
        await ask(gateway, gateway.url, "/v1/pods")
        assert not records(caplog), "what machines and clients do is no action of an operator"
        await ask(gateway, gateway.admin_url, "/v1/pods")
        await ask(gateway, gateway.admin_url, "/v1/route/explain")
        engines[1].reset_status = 500
        await ask(gateway, gateway.admin_url, "/reset_prefix_cache")
        await ask(gateway, gateway.admin_url, "/" + "x" * 5000 + "%0A", "GET")
        async with gateway.session.post(f"{gateway.admin_url}/v1/route/explain", data=b"{") as answer:
            assert answer.status == 400
    lines = records(caplog)
    assert [(line["action"], line["detail"], line["status"]) for line in lines if "xxx" not in line["action"]] == [
        ("GET /v1/pods", {}, 200),
        ("POST /v1/route/explain", {"model": "m"}, 200),
        ("POST /reset_prefix_cache", {"engines": 2, "failed": ["b"]}, 502),
        ("POST /v1/route/explain", {}, 400),
    ]
    assert all(line["by"] == "127.0.0.1" for line in lines)
    assert all(line["time"].endswith("+00:00") for line in lines)
    assert len(lines[3]["action"]) < 250
    assert "\n" not in lines[3]["action"]
