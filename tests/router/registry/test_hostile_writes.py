"""An engine's user of Redis may write what it likes under its keys: other engines' keys are still found."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import NoPermissionError, ResponseError

from engine.common.redis_client import connect
from engine.contract.events import Tier
from engine.contract.redis_keys import resync_key, snapshot_key, stream_key
from engine.contract.redis_roles import ENGINE_RULES, ENGINE_RULES_7, GATEWAY_RULES
from router.registry.wire import LAST_ID, RedisWire
from tests.conftest import wait_until
from tests.redis_server import RedisServer
from tests.router.registry.ends import MODEL, FakeEngine, Gateway
from tests.router.registry.test_roles import As

STREAM = stream_key(MODEL)
WRITES: dict[str, tuple[Any, ...]] = {
    "a string for the stream": ("SET", STREAM, "x"),
    "a large string for the stream": ("SET", STREAM, b"x" * 2**20),
    "the last id of the stream": ("XADD", STREAM, LAST_ID, "p", "b", "d", "x"),
    "the last id of a stream without entries": ("XADD", STREAM, "MAXLEN", 0, LAST_ID, "p", "b", "d", "x"),
    "an entry of a far future": ("XADD", STREAM, "99999999999999-0", "p", "b", "d", "x"),
    "an entry without a field that is known": ("XADD", STREAM, "*", b"\xff", b"\xff"),
    "an entry that is no message": ("XADD", STREAM, "*", "p", "a", "d", b"\xff" * 64),
    "a pod's name that is no text": ("XADD", STREAM, "*", "p", b"\xff\xfe", "d", b""),
    "no snapshot": ("SET", snapshot_key(MODEL, "a"), b"\xff"),
    "a stream for the snapshot": ("XADD", snapshot_key(MODEL, "a"), "*", "a", "b"),
    "no stream": ("DEL", STREAM),
    "no life left": ("PEXPIRE", STREAM, 1),
    "a stream for the question": ("XADD", resync_key(MODEL, "a"), "*", "a", "b"),
}


@pytest.fixture
def hostile(redis_server: RedisServer) -> Any:
    """Return a function that runs a command as an engine's user of Redis 6.2."""
    with redis.Redis.from_url(redis_server.url) as admin:
        for user, rules in (("engine", ENGINE_RULES), ("gateway", GATEWAY_RULES)):
            admin.execute_command("ACL", "SETUSER", user, "reset", "on", ">secret", *rules.split())

    def run(*command: Any) -> None:
        with redis.Redis.from_url(As(redis_server, "engine").url) as client:
            if command[0] == "XADD" and command[1] != STREAM:
                client.delete(command[1])
            with contextlib.suppress(ResponseError):  # once the stream has the id, the next write fails
                client.execute_command(*command)

    return run


@pytest.mark.parametrize("write", WRITES)
async def test_whatever_an_engine_writes_the_others_are_read(
    redis_server: RedisServer, hostile: Callable[..., None], write: str, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [FakeEngine(redis_server, pod, epoch=1) for pod in "ab"]
    gateway = Gateway(As(redis_server, "gateway"))  # type: ignore[arg-type]
    with caplog.at_level(logging.ERROR):
        async with contextlib.AsyncExitStack() as stack:
            for engine in engines:
                await stack.enter_async_context(engine.running())
            await stack.enter_async_context(gateway.following(*engines))
            for at, engine in enumerate(engines):
                engine.change({at: Tier.GPU})
            await gateway.wait_equal(*engines)
            for turn in range(3):
                hostile(*WRITES[write])
                for at, engine in enumerate(engines):
                    engine.change({100 + 10 * turn + at: Tier.GPU}, removed={at})
                await gateway.wait_equal(*engines)
            late = Gateway(As(redis_server, "gateway"))  # type: ignore[arg-type]
            hostile(*WRITES[write])
            async with late.following(*engines):
                await late.wait_equal(*engines)
            await wait_until(lambda: gateway.reader.status().connected)
    if "stream" in write or "id" in write.split():
        assert len(caplog.messages) < 40, "it is said, and not without end"


@pytest.mark.parametrize("write", ["a string for the stream", "the last id of the stream"])
async def test_a_wire_writes_where_something_else_stood(
    redis_server: RedisServer, hostile: Callable[..., None], write: str
) -> None:
    wire = RedisWire(As(redis_server, "gateway").url)
    try:
        hostile(*WRITES[write])
        if write.startswith("the last"):
            assert await wire.newest(STREAM) == b"0-0"
            await asyncio.sleep(0.01)
        await wire.append(STREAM, {b"d": b"x"}, oldest_s=0.0, kept_s=60.0)
        assert b"0-0" < await wire.newest(STREAM) < LAST_ID
    finally:
        await wire.close()


REDIS_7 = shutil.which("redis-server") or shutil.which("valkey-server")


@pytest.fixture
def users() -> list[str]:
    """Return the server's arguments for both users, as the chart has them."""
    if REDIS_7 is None:
        pytest.skip("needs redis-server 7 or later on PATH")
    rules = (("engine", ENGINE_RULES_7), ("gateway", GATEWAY_RULES))
    found = [["--user", user, "on", ">secret", *text.split()] for user, text in rules]
    return [word for words in found for word in words]


async def test_the_rules_with_selectors_leave_an_engine_its_own_commands_for_each_kind_of_key(
    tmp_path: Path, users: list[str]
) -> None:
    assert REDIS_7 is not None
    socket, bounds = tmp_path / "redis.sock", ["--proto-max-bulk-len", "32mb"]
    where = ["--port", "0", "--unixsocket", str(socket), "--dir", str(tmp_path), "--save", ""]
    process = await asyncio.create_subprocess_exec(REDIS_7, *where, *bounds, *users, stdout=asyncio.subprocess.DEVNULL)
    try:
        await wait_until(socket.exists)
        server: Any = type("Server", (), {"url": f"unix://{socket}"})
        engine, gateway = FakeEngine(As(server, "engine"), "a", epoch=1), Gateway(As(server, "gateway"))  # type: ignore[arg-type]
        async with engine.running(), gateway.following(engine):
            engine.change({1: Tier.GPU})
            await gateway.wait_equal(engine)
            async with connect(server.url) as admin:
                await admin.delete(STREAM)  # the gateway asks for a snapshot, and the engine hears it
            engine.change({2: Tier.GPU}, removed={1})
            await gateway.wait_equal(engine)
        async with connect(As(server, "engine").url) as client:
            for command in (
                ("SET", STREAM, "x"),
                ("DEL", STREAM),
                ("XADD", snapshot_key(MODEL, "a"), "*", "a", "b"),
                ("XADD", resync_key(MODEL, "a"), "*", "a", "b"),
                ("SET", resync_key(MODEL, "a"), "x"),
                ("GETDEL", snapshot_key(MODEL, "a")),
                ("SET", "warmroute:{x}:place", "x"),
            ):
                with pytest.raises(NoPermissionError):
                    await client.execute_command(*command)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
