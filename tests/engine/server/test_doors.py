"""Access to an engine's routes: clients with a key, Prometheus, and operators at their own port."""

from __future__ import annotations

import logging
from pathlib import Path

import orjson
import pytest

from engine.common import files
from engine.common.api_keys import KeyFileError
from engine.common.audit import AUDIT
from tests.engine.server.conftest import Engine, Start, wait_until

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
COMPUTING = (("POST", CHAT), ("POST", "/v1/completions"), ("POST", "/tokenize"), ("GET", "/v1/models"))
OPERATING = (("POST", "/reset_prefix_cache"), ("GET", "/debug/held_keys"), ("GET", "/debug/cache"))


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# of gateways\nold\nnew\n")
    return path


def put(path: Path, text: str) -> None:
    """Replace the file in one step, as a Secret is replaced. Otherwise an engine could read an empty file."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


async def status_of(engine: Engine, port: int | None, method: str, path: str, key: str = "") -> int:
    sent = {"Authorization": f"Bearer {key}"} if key else {}
    url, fields = f"http://127.0.0.1:{port}{path}", {"model": "tiny", "messages": HELLO, "max_tokens": 1}
    fields = fields if path == CHAT else {"model": "tiny", "prompt": "x"}
    async with engine.http.request(method, url, json=fields, headers=sent) as answer:
        if answer.status == 401:
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert (await answer.json())["error"]["type"] == "invalid_request_error"
        return answer.status


async def test_without_any_of_it_one_port_serves_all(engine: Engine) -> None:
    for method, path in (*COMPUTING, *OPERATING, ("GET", "/health"), ("GET", "/metrics")):
        assert await status_of(engine, engine.ports.clients, method, path) == 200, path


async def test_a_key_guards_all_but_what_machines_ask(start: Start, key_file: Path) -> None:
    async with start(api_key_file=key_file) as engine:
        port = engine.ports.clients
        for method, path in (*COMPUTING, *OPERATING, ("GET", "/nothing")):
            for wrong in ("", "wrong", "# of gateways"):
                assert await status_of(engine, port, method, path, wrong) == 401, path
        assert engine.service.scheduler.stats().preemptions == 0
        for method, path in (*COMPUTING, *OPERATING):
            for key in ("old", "new"):
                assert await status_of(engine, port, method, path, key) == 200, path
        for path in ("/health", "/metrics"):
            assert await status_of(engine, port, "GET", path) == 200


@pytest.mark.parametrize("has_key", [False, True])
async def test_operators_have_a_port_of_their_own(start: Start, key_file: Path, has_key: bool) -> None:
    async with start(admin_port=0, metrics_port=0, api_key_file=key_file if has_key else None) as engine:
        ports, key = engine.ports, "old" if has_key else ""
        assert await status_of(engine, ports.clients, "GET", "/debug/held_keys", key) == 404
        assert await status_of(engine, ports.clients, "GET", "/metrics", key) == 404
        reset = await status_of(engine, ports.clients, "POST", "/reset_prefix_cache", key)
        assert reset == (200 if has_key else 404), "with a key, gateways may reset caches at the clients' port"
        for method, path in (*OPERATING, ("GET", "/health"), ("GET", "/metrics")):
            assert await status_of(engine, ports.admin, method, path) == 200, path
        assert await status_of(engine, ports.admin, "POST", CHAT) == 404
        assert await status_of(engine, ports.metrics, "GET", "/metrics") == 200
        for method, path in (*COMPUTING, *OPERATING):
            assert await status_of(engine, ports.metrics, method, path) == 404
        assert await status_of(engine, ports.clients, "GET", "/health") == 200


async def test_keys_change_while_it_runs_and_a_file_that_is_none_changes_nothing(
    start: Start, key_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "REREAD_S", 0.01)
    async with start(api_key_file=key_file) as engine:
        put(key_file, "two words\n")
        await wait_until(lambda: "line 1 is not a key" in caplog.text)
        assert await status_of(engine, engine.ports.clients, "POST", CHAT, "old") == 200
        caplog.clear()
        caplog.set_level(logging.INFO)
        put(key_file, "newest\n")
        await wait_until(lambda: f"{key_file} was read" in caplog.text)
        assert await status_of(engine, engine.ports.clients, "POST", CHAT, "old") == 401
        assert await status_of(engine, engine.ports.clients, "POST", CHAT, "newest") == 200
    assert "two words" not in caplog.text


async def test_a_file_without_a_key_is_refused_at_the_start(start: Start, key_file: Path) -> None:
    put(key_file, "# nothing\n")
    with pytest.raises(KeyFileError, match="holds no key; write one a line"):
        async with start(api_key_file=key_file):
            pass


async def test_every_action_of_an_operator_leaves_a_line(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, AUDIT)
    port = engine.ports.clients
    for method, path in (*COMPUTING, *OPERATING, ("GET", "/health"), ("GET", "/metrics")):
        await status_of(engine, port, method, path)
    engine.state.is_draining = True
    assert await status_of(engine, port, "POST", "/reset_prefix_cache") == 503
    lines = [orjson.loads(record.message)["audit"] for record in caplog.records if record.name == AUDIT]
    assert [(line["action"], line["by"], line["status"]) for line in lines] == [
        ("POST /reset_prefix_cache", "127.0.0.1", 200),
        ("GET /debug/held_keys", "127.0.0.1", 200),
        ("GET /debug/cache", "127.0.0.1", 200),
        ("POST /reset_prefix_cache", "127.0.0.1", 503),
    ]
    assert lines[0]["detail"]["freed_blocks"] > 0
