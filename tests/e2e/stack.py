"""A fleet for a test: real engine processes, a real Redis, and the gateway application in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from engine.common.sse import SseDecoder
from engine.contract import headers
from router.startup.parts import INDEX
from router.startup.serving import make_runner
from router.views.types import PodId
from tests.e2e.programs import Program
from tests.redis_server import RedisServer
from tests.router.rig.helpers import app_of, serving_admin

PODS = 3


@dataclass(slots=True)
class Stack:
    """A running fleet."""

    redis: RedisServer
    engines: list[Program]
    app: web.Application
    gateway: str
    admin: str
    http: aiohttp.ClientSession

    async def ask(self, prompt: str, *, max_tokens: int = 8, model: str = "tiny") -> tuple[int, str]:
        """Return status and pod of one streamed completion, read to its end. The status is 599 after an error event."""
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        async with self.http.post(f"{self.gateway}/v1/completions", json=body) as answer:
            decoder, events = SseDecoder(), list[bytes]()
            with contextlib.suppress(aiohttp.ClientPayloadError):  # a broken stream raises it after its error event
                async for chunk in answer.content.iter_any():
                    events += decoder.feed(chunk)
            pod = answer.headers.get(headers.POD, "")
            if answer.status == 200 and (not events or events[-1] != b"[DONE]"):
                assert events, "a broken stream ends in an error event"
                assert b'"error"' in events[-1], "a broken stream ends in an error event"
                return 599, pod
            return answer.status, pod

    async def held_by_engines(self) -> dict[PodId, set[int]]:
        held = {}
        for engine in self.engines:
            async with self.http.get(f"{engine.url}/v1/models") as models:
                pod = PodId(models.headers[headers.POD])
            async with self.http.get(f"{engine.url}/debug/held_keys") as answer:
                keys = (await answer.json())["keys"]
            held[pod] = {int(key, 16) for tier in keys.values() for key in tier}
        return held

    def held_by_index(self, pods: list[PodId]) -> dict[PodId, set[int]]:
        index = self.app[INDEX]
        return {pod: {int(key) for keys in index.held(pod).values() for key in keys} for pod in pods}

    async def metric(self, engine: Program, name: str) -> float:
        async with self.http.get(f"{engine.url}/metrics") as answer:
            for line in (await answer.text()).splitlines():
                if line.startswith(name):
                    return float(line.rpartition(" ")[2])
        raise AssertionError(f"{name} is not exported")


@contextlib.asynccontextmanager
async def gateway_before(server: RedisServer, engines: list[Program], **settings: object) -> AsyncIterator[Stack]:
    defaults = {"redis_url": server.url, "lease_s": 2.0, "probe_interval_s": 0.3, "port": 0}
    app = app_of(engines=[e.url for e in engines], **{**defaults, **settings})
    runner = make_runner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http, serving_admin(app) as admin:
            stack = Stack(server, engines, app, url, f"http://127.0.0.1:{admin.addresses[0][1]}", http)
            async with asyncio.timeout(15):
                while True:
                    async with http.get(f"{url}/ready?engines={len(engines)}") as ready:
                        if ready.status == 200:
                            break
                    await asyncio.sleep(0.02)
            yield stack
    finally:
        await runner.cleanup()


async def empty_caches(engines: Iterable[Program]) -> None:
    """Empty the engines' caches. Otherwise frequent prompts of other tests would stay, and the test's own prompts would
    be evicted."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
        for engine in engines:
            async with http.post(f"{engine.url}/reset_prefix_cache") as answer:
                assert answer.status == 200, await answer.text()


async def wait_index_equal(stack: Stack, deadline_s: float = 5.0) -> dict[PodId, set[int]]:
    """Wait until the index equals the keys that the engines report. Without traffic that takes a few seconds."""
    async with asyncio.timeout(deadline_s):
        while True:
            truth = await stack.held_by_engines()
            if stack.held_by_index(list(truth)) == truth:
                return truth
            await asyncio.sleep(0.1)
