"""A scripted gateway whose policies differ in known ways, in this event loop or in its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import orjson
from aiohttp import web

from engine.contract import headers
from tests.loadgen.scripted_gateway import TOKENS_PER_WORD, ScriptedGateway, ScriptedPod


@dataclass
class CountedPod(ScriptedPod):
    """Counts tokens as vLLM does."""

    queries: int = 0
    hits: int = 0

    async def serve(self, words: list[str]) -> int:
        """See `ScriptedPod.serve`."""
        cached = await super().serve(words)
        self.queries += len(words) * TOKENS_PER_WORD
        self.hits += cached
        return cached


@dataclass
class ArmGateway(ScriptedGateway):
    """`delay_s`: what each policy adds to the TTFT. `failing` policies refuse measured requests whose last message has
    an even number of words."""

    delay_s: dict[str, float] = field(default_factory=dict)
    failing: tuple[str, ...] = ()
    known: tuple[str, ...] = ("round_robin", "predicted_ttft", "affinity_groups")
    lists_pods: bool = True
    model: str = "scripted"
    scrapable: bool = True
    counters_differ_by: int = 0
    """Each pod's counter of hits exceeds the cached tokens in its usage by this many times its counter of queries."""
    admin_headers: list[Mapping[str, str]] = field(default_factory=list)
    """Headers of the requests for the list of pods."""
    on_reset: Callable[[int], None] = lambda number: None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pods = [CountedPod(self.pool_blocks, self.token_s) for _ in range(self.pods)]

    def add_routes(self, app: web.Application) -> None:
        """Add the served paths."""
        super().add_routes(app)
        app.router.add_get("/v1/pods", self._list)
        app.router.add_get("/pod/{number}/metrics", self._metrics)
        app.router.add_post("/pod/{number}/reset_prefix_cache", self._reset)

    async def _list(self, request: web.Request) -> web.Response:
        self.admin_headers.append(request.headers)
        if not self.lists_pods:
            return web.Response(status=404, text="no such endpoint")
        pods = [{"url": f"{self.url}/pod/{i}", "pod": f"pod-{i}", "admitted": True} for i in range(self.pods)]
        return web.json_response({"pods": pods})

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self.scrapable:
            return web.Response(status=403)
        pod = self._pods[int(request.match_info["number"])]
        assert isinstance(pod, CountedPod)
        extra = self.counters_differ_by if pod.queries else 0
        return web.Response(
            text="# TYPE vllm:prefix_cache_queries counter\n"
            f'vllm:prefix_cache_queries_total{{model_name="{self.model}"}} {pod.queries}\n'
            "# TYPE vllm:prefix_cache_hits counter\n"
            f'vllm:prefix_cache_hits_total{{model_name="{self.model}"}} {pod.hits + extra * pod.queries}\n'
        )

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def _reset(self, request: web.Request) -> web.Response:
        answer = await super()._reset(request)
        self.on_reset(self.log.count(("reset", "")))
        return answer

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        policy = request.headers.get(headers.POLICY, "")
        if policy and policy not in self.known:
            message = f"{headers.POLICY}: unknown policy {policy!r}; known: {', '.join(self.known)}"
            return web.json_response({"error": {"message": message}}, status=400)
        body = orjson.loads(await request.read())
        is_measured = body["messages"][0]["role"] == "system"
        if is_measured and policy in self.failing and len(str(body["messages"][-1]["content"]).split()) % 2 == 0:
            self.log.append(("chat", policy))
            self.bodies.append(body)
            return web.json_response({"error": {"message": "overloaded"}}, status=503)
        if is_measured:
            await asyncio.sleep(self.delay_s.get(policy, 0.0))
        return await super()._chat(request)


def measured(gateway: ScriptedGateway) -> list[tuple[str, list[dict[str, str]]]]:
    """Return policy and messages of each measured request, in order of arrival."""
    chats = [policy for kind, policy in gateway.log if kind == "chat"]
    return [
        (policy, body["messages"])
        for policy, body in zip(chats, gateway.bodies, strict=True)
        if body["messages"][0]["role"] == "system"
    ]


G = TypeVar("G", bound=ArmGateway)


@contextmanager
def in_thread(gateway: G) -> Iterator[G]:
    """Serve from another thread, for tests of commands that run their own loop."""
    ready, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        async with gateway.running():
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield gateway
    finally:
        stop.set()
        thread.join(30)
