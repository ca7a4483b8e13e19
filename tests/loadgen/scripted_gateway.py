"""An OpenAI-like gateway over simulated pods: a serial prefill, an LRU prefix cache, faults on demand."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import orjson
from aiohttp import web

from engine.common.sse import DONE, sse_event
from engine.contract import headers

BLOCK_WORDS = 16
TOKENS_PER_WORD = 2


@dataclass
class ScriptedPod:
    """Prefill takes `token_s` per uncached token, one request at a time; decoding is free."""

    pool_blocks: int
    token_s: float
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)
    prefill: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def serve(self, words: list[str]) -> int:
        """Wait for the prefill of the prompt; return its cached tokens."""
        async with self.prefill:
            keys = [hash(tuple(words[: i + BLOCK_WORDS])) for i in range(0, len(words) - BLOCK_WORDS + 1, BLOCK_WORDS)]
            hits = len(list(itertools.takewhile(self.blocks.__contains__, keys)))
            await asyncio.sleep((len(words) - hits * BLOCK_WORDS) * TOKENS_PER_WORD * self.token_s)
            for key in reversed(keys):
                self.blocks[key] = None
                self.blocks.move_to_end(key)
            while len(self.blocks) > self.pool_blocks:
                self.blocks.popitem(last=False)
        return hits * BLOCK_WORDS * TOKENS_PER_WORD


@dataclass
class ScriptedGateway:
    """A gateway. `fault` takes a request's body and returns the name of a fault, or None."""

    pods: int = 4
    pool_blocks: int = 200
    token_s: float = 0.0
    gap_s: float = 0.0
    allows_reset: bool = True
    allows_policy: bool = True
    has_usage: bool = True
    fault: Callable[[dict[str, Any]], str | None] = lambda body: None
    log: list[tuple[str, str]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    was_reset: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._pods = [ScriptedPod(self.pool_blocks, self.token_s) for _ in range(self.pods)]
        self._turn = itertools.count()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Serve on a real socket."""
        app = web.Application()
        self.add_routes(app)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    def add_routes(self, app: web.Application) -> None:
        """Add the served paths."""
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/reset_prefix_cache", self._reset)
        app.router.add_post("/v1/chat/completions", self._chat)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "scripted", "object": "model"}]})

    async def _reset(self, request: web.Request) -> web.Response:
        self.log.append(("reset", ""))
        self.was_reset.set()
        if not self.allows_reset:
            return web.Response(status=404, text="no such endpoint")
        for pod in self._pods:
            pod.blocks.clear()
        return web.Response()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        policy = request.headers.get(headers.POLICY, "predicted_ttft") if self.allows_policy else "predicted_ttft"
        self.log.append(("chat", policy))
        self.bodies.append(body)
        fault = self.fault(body)
        if fault and fault.startswith("http "):
            return web.json_response({"error": {"message": "scripted"}}, status=int(fault.removeprefix("http ")))
        text = "\x1e".join(f"{message['role']} {message['content']}" for message in body["messages"])
        number = self._choose(policy, text)
        words = text.split()
        cached = await self._pods[number].serve(words)
        response = web.StreamResponse(
            headers={"content-type": "text/event-stream", headers.POD: f"pod-{number}", headers.POLICY: policy}
        )
        await response.prepare(request)
        await self._stream(response, body, len(words) * TOKENS_PER_WORD, cached, fault)
        return response

    def _choose(self, policy: str, text: str) -> int:
        if policy == "round_robin":
            return next(self._turn) % self.pods
        return sum(text[:60].encode()) % self.pods

    async def _stream(
        self, response: web.StreamResponse, body: dict[str, Any], prompt: int, cached: int, fault: str | None
    ) -> None:
        async def send(event: dict[str, Any]) -> None:
            await response.write(sse_event(orjson.dumps(event)))

        await send({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for i in range(body["max_tokens"]):
            if i:
                await asyncio.sleep(self.gap_s)
            if i == 1 and fault:
                return await self._break(response, send, fault)
            await send({"choices": [{"index": 0, "delta": {"content": f"w{i} "}, "finish_reason": None}]})
        await send({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        if self.has_usage:
            details = {"prompt_tokens_details": {"cached_tokens": cached}}
            await send(
                {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": body["max_tokens"], **details}}
            )
        await response.write(DONE)

    async def _break(self, response: web.StreamResponse, send: Any, fault: str) -> None:
        if fault == "error event":
            await send({"error": {"message": "scripted", "type": "server_error", "param": None, "code": None}})
        elif fault == "nonsense":
            await response.write(b"data: {no json\n\n")
        elif fault == "stall":
            await asyncio.sleep(30)
        elif fault == "drop":
            transport = response._req.transport  # type: ignore[union-attr]
            assert transport is not None
            transport.abort()
