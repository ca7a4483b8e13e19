"""Engines and gateways of an earlier release and of this one, in one fleet with one Redis, as during a rollout."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from engine.contract import headers
from tests.e2e.programs import Program, running
from tests.redis_server import running_redis

BEFORE = "846b5094b8f7366458552ba9a9ba82d9f0a2e7a1"
"""The earlier release, which lacks everything that keeps a large fleet cheap."""
HERE = Path(__file__).parents[2]
TRIES = 20


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Yield the source tree of that release. Skips if the history does not reach back to it, as in a shallow clone."""
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    packed = subprocess.run(["git", "archive", BEFORE, "engine", "router"], cwd=HERE, capture_output=True, timeout=60)
    if packed.returncode:
        pytest.skip(f"git has no tree of {BEFORE[:7]}: {packed.stderr.decode(errors='replace').strip()}")
    folder = tmp_path_factory.mktemp("before")
    subprocess.run(["tar", "x", "-C", str(folder)], input=packed.stdout, check=True, timeout=60)
    return folder


@dataclass
class Fleet:
    """Two engines and two gateways; the first of each belongs to the earlier release."""

    engines: list[Program]
    gateways: list[Program]
    engine_flags: list[str]
    http: aiohttp.ClientSession

    async def ask(self, url: str, prompt: str) -> tuple[int, str, int]:
        """Return a completion's status, its pod, and the tokens that the gateway believed cached on it."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "ignore_eos": True}
        async with self.http.post(f"{url}/v1/completions", json=body) as answer:
            await answer.read()
            predicted = int(answer.headers.get(headers.PREDICTED_CACHED, "0"))
            return answer.status, answer.headers.get(headers.POD, ""), predicted

    async def is_warm(self, gateway: Program, engine: Program, name: str) -> bool:
        """Send prefixes to the engine itself, and return whether the gateway learns that it holds one of them."""
        for i in range(TRIES):
            prompt = f"Handbook {name} {i}, that one engine has seen so far. " * 30
            assert (await self.ask(engine.url, prompt))[0] == 200
            await asyncio.sleep(0.3 + 0.1 * i)
            status, pod, predicted = await self.ask(gateway.url, prompt)
            assert status == 200
            if predicted and urlsplit(engine.url).port == int(pod.rpartition(":")[2]):
                return True
        return False


@pytest.fixture(scope="module")
def programs(before: Path, tiny_checkpoint: Path) -> Iterator[tuple[list[Program], list[Program], list[str]]]:
    flags = ["--model", str(tiny_checkpoint), "--served-model-name", "tiny", "--device", "sim"]
    with running_redis() as server, contextlib.ExitStack() as stack:
        flags += ["--redis-url", server.url]
        engines = [Program("engine", *flags, "--port", "0", folder=tree) for tree in (before, HERE)]
        urls = ",".join(stack.enter_context(running(engines)))
        shared = ["--engines", urls, "--redis-url", server.url, "--port", "0"]
        gateways = [
            Program("router", *shared, "--probe-interval-s", "0.3", folder=before),
            Program(
                "tests.router.rig.gateway_program",
                '{"probe_interval_s": 0.3}',
                *shared,
                "--admin-port=0",
                folder=HERE,
            ),
        ]
        stack.enter_context(running(gateways))
        yield engines, gateways, flags


@pytest.fixture
async def fleet(programs: tuple[list[Program], list[Program], list[str]]) -> AsyncIterator[Fleet]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
        yield Fleet(*programs, http)


async def test_each_gateway_learns_from_each_engine_what_it_holds(fleet: Fleet) -> None:
    for g, gateway in enumerate(fleet.gateways):
        for e, engine in enumerate(fleet.engines):
            assert await fleet.is_warm(gateway, engine, f"{g}{e}"), (
                f"gateway {g}, engine {e} (0: earlier release, 1: this release)"
            )


async def test_nothing_of_the_release_before_is_refused(fleet: Fleet) -> None:
    async def read() -> dict[str, float]:
        async with fleet.http.get(f"{fleet.gateways[1].admin}/metrics") as answer:
            lines = [line for line in (await answer.text()).splitlines() if not line.startswith("#")]
        pairs = (line.rpartition(" ") for line in lines)
        return {name: float(value) for name, _, value in pairs if "_registry_" in name}

    async with asyncio.timeout(30):
        while (told := await read())["warmroute_gateway_registry_pods_synced"] < len(fleet.engines):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    assert told["warmroute_gateway_registry_refused_total"] == 0
    assert told["warmroute_gateway_registry_unknown_total"] == 0


async def test_an_engine_is_replaced_under_traffic_and_nothing_but_warmth_is_lost(fleet: Fleet) -> None:
    statuses: list[int] = []
    is_over = asyncio.Event()

    async def traffic(gateway: Program) -> None:
        while not is_over.is_set():
            status, _, _ = await fleet.ask(gateway.url, f"Question {len(statuses)}. " * 40)
            statuses.append(status)

    async with asyncio.TaskGroup() as group:
        for gateway in fleet.gateways:
            group.create_task(traffic(gateway))
        await asyncio.sleep(0.5)
        old = fleet.engines[0]
        port = str(urlsplit(old.url).port)
        assert await asyncio.to_thread(old.stop) == 0
        new = Program("engine", *fleet.engine_flags, "--port", port, folder=HERE)
        try:
            await asyncio.to_thread(new.wait_ready)
            assert await fleet.is_warm(fleet.gateways[0], new, "again, before")
            assert await fleet.is_warm(fleet.gateways[1], new, "again, this")
        finally:
            is_over.set()
            await asyncio.to_thread(new.stop)
    assert len(statuses) > 10
    assert set(statuses) == {200}
