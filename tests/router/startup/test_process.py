"""The program as users start it: its one line of output, its signals, its exit status."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator

import aiohttp
import orjson
import pytest

from engine.common.sse import DONE
from tests.router.rig.helpers import ScriptedEngine, event, stalls_after, streams

pytestmark = pytest.mark.realtime
STREAM = {"model": "m", "prompt": "x", "stream": True}
START_S = 90.0
"""Importing takes two seconds of a core; a busy machine may give the process a twentieth of a core."""
DEADLINE_S = 50.0
"""Less than the 60 s that a drain may take, so that the test notices a signal without effect."""


@pytest.fixture
def no_blocking_calls() -> None:
    """Allow blocking calls, such as starting a process. The gateway under test is another process here."""


@contextlib.asynccontextmanager
async def program(
    engine: ScriptedEngine, *flags: str, url: str = "http://127.0.0.1:"
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A gateway process in front of the engine, and its address once it is ready."""
    await engine.start()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WARMROUTE_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "router",
        "--port=0",
        f"--engines={engine.url}",
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environ,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            line = (await process.stdout.readline()).decode()
        assert line.startswith(f"listening on {url}"), line
        url = line.removeprefix("listening on ").strip().replace("0.0.0.0", "127.0.0.1")
        await wait_ready(url)
        yield process, url
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
        await engine.stop()


async def wait_ready(url: str) -> None:
    async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/ready?engines=1") as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_streams_finish(number: signal.Signals) -> None:
    chunks = [*(event(str(i)) for i in range(30)), DONE]
    engine = ScriptedEngine("a", streams(chunks, gap_s=0.02))
    async with program(engine, "--drain-delay-s", "0.3") as (process, url), aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/completions", json=STREAM) as answer:
            first = await answer.content.readany()
            process.send_signal(number)
            await asyncio.sleep(0.1)
            async with session.get(f"{url}/ready") as ready:
                assert (ready.status, (await ready.json())["missing"]) == (503, ["the gateway is shutting down"])
            rest = await answer.read()
        assert first + rest == b"".join(chunks)
        async with asyncio.timeout(DEADLINE_S):
            assert await process.wait() == 0
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(f"{url}/health")


async def test_while_draining_kept_connections_are_given_up() -> None:
    """Otherwise a client would send its next request on a connection that is closing."""
    engine = ScriptedEngine("a", streams([event("a"), DONE]))
    async with program(engine, "--drain-delay-s", "30") as (process, url), aiohttp.ClientSession() as session:

        async def connection() -> str | None:
            async with session.post(f"{url}/v1/completions", json=STREAM) as answer:
                await answer.read()
                return answer.headers.get("Connection")

        assert await connection() != "close"
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            while True:
                async with session.get(f"{url}/ready") as ready:
                    if ready.status == 503:
                        break
                await asyncio.sleep(0.02)
        assert await connection() == "close"


@pytest.mark.parametrize("how", ["second signal", "drain timeout"])
async def test_the_drain_is_bounded(how: str) -> None:
    engine = ScriptedEngine("a", stalls_after([event("a")]))
    flags = ("--drain-timeout-s", "0.2") if how == "drain timeout" else ()
    async with program(engine, *flags) as (process, url), aiohttp.ClientSession() as session:
        async with session.post(f"{url}/v1/completions", json=STREAM) as answer:
            await answer.content.readany()
            process.send_signal(signal.SIGTERM)
            if how == "second signal":
                await asyncio.sleep(0.2)
                assert process.returncode is None
                process.send_signal(signal.SIGTERM)
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        async with asyncio.timeout(DEADLINE_S):
            assert await process.wait() == 0


async def test_a_port_in_use_is_said_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "router",
            f"--port={port}",
            "--engines=http://127.0.0.1:1",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(START_S):
            out, err = await process.communicate()
    assert process.returncode == 1
    assert not out
    assert f"cannot listen on 127.0.0.1:{port}" in err.decode()
    assert "Traceback" not in err.decode()


async def test_metrics_have_a_port_of_their_own_until_the_end(unused_tcp_port: int) -> None:
    engine = ScriptedEngine("a", streams([event("a"), DONE]))
    flags = ("--metrics-port", str(unused_tcp_port), "--drain-delay-s", "0.5")
    async with program(engine, *flags) as (process, url), aiohttp.ClientSession() as session:
        assert process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            line = (await process.stdout.readline()).decode()
        assert line == f"metrics on http://127.0.0.1:{unused_tcp_port}/metrics\n"
        metrics_url = line.split()[-1]
        async with session.get(f"{url}/metrics") as answer:
            assert answer.status == 404
        async with session.get(metrics_url) as answer:
            assert "warmroute_gateway_pods_admitted 1.0" in await answer.text()
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            assert await process.wait() == 0


async def test_the_administration_is_on_loopback_and_its_actions_are_on_stderr() -> None:
    engine = ScriptedEngine("a", streams([event("a"), DONE]))
    async with program(engine, "--host", "0.0.0.0", "--admin-port", "0", url="http://0.0.0.0:") as (process, url):
        assert process.stdout is not None
        assert process.stderr is not None
        async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session:
            line = (await process.stdout.readline()).decode()
            assert line.startswith("administration on http://127.0.0.1:")
            async with session.post(f"{line.split()[-1]}/reset_prefix_cache") as answer:
                assert answer.status == 200
            async with session.post(f"{url}/reset_prefix_cache") as answer:
                assert answer.status == 404
            lines: list[bytes] = []
            while not lines or b"audit" not in lines[-1]:
                lines.append(await process.stderr.readline())
    assert orjson.loads(lines[-1])["audit"]["action"] == "POST /reset_prefix_cache"
    assert engine.resets == 1


@pytest.mark.parametrize("flag", ["--api-keys-file", "--engine-api-key-file"])
async def test_a_key_file_that_is_not_there_is_said_in_one_line(flag: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "router",
        "--port=0",
        "--engines=http://127.0.0.1:1",
        flag,
        "/nowhere/keys",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(START_S):
        out, err = await process.communicate()
    assert (process.returncode, out) == (2, b"")
    assert err.decode().startswith("warmroute-gateway: /nowhere/keys cannot be read: ")
    assert len(err.decode().splitlines()) == 1


DYING = """
from router.registry.index import PrefixIndex

asked = []
speculate = PrefixIndex.speculate

def note(*args):
    asked.append(1)
    speculate(*args)

def dies(self, budget):
    if asked:
        raise RuntimeError("the sweeper has a defect")

PrefixIndex.speculate, PrefixIndex.sweep = note, dies
from router.__main__ import main
main()
"""


async def test_a_background_task_that_dies_ends_the_process_once_streams_are_done() -> None:
    """Kubernetes restarts it: half of a gateway is worse than none."""
    engine = ScriptedEngine("a", streams([*(event(str(number)) for number in range(8)), DONE], gap_s=0.1))
    await engine.start()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        DYING,
        "--port=0",
        f"--engines={engine.url}",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            url = (await process.stdout.readline()).decode().removeprefix("listening on ").strip()
            await wait_ready(url)
            async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=STREAM) as answer:
                body = await answer.read()
            _, told = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
        await engine.stop()
    assert process.returncode == 1
    assert (body.count(b"data: "), body.endswith(DONE)) == (9, True), "the running stream is finished"
    assert "the sweep of the index failed: RuntimeError: the sweeper has a defect" in told.decode()
