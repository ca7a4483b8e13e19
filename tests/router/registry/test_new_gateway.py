"""A new gateway knows what earlier gateways know: what pods hold, and what was learnt from answers."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from aiohttp import web

from engine.common.redis_client import connect
from engine.contract.redis_keys import LEARNT_KEY
from router.registry.learnt import decode_learnt
from router.startup.parts import FLEET, INDEX, READINESS
from tests.redis_server import RedisServer
from tests.router.fleet.pages import Load, vllm_page
from tests.router.peer_sync.test_gateways_share import assumed, sharing
from tests.router.rig.helpers import Gateway, ScriptedEngine, event, eventually, running, usage_event

BLOCK = 32
TOKENS_PER_BYTE = 0.42
"""Far from the 0.25 tokens per byte that a gateway assumes at first."""
PREFIXES, PREFIX_BYTES, REQUESTS = 8, 1540, 96
"""A prefix has six keys of 107 tokens, and each prompt adds a few more. Each prefix is requested twelve times in a row,
every second time from the same engine."""
BLOCKS = 280
"""Blocks of each engine, 8,960 tokens: room for all prefixes and the ends of a hundred prompts. If a key counted as 64
tokens (0.25 per byte), 43 tokens of each key would count as the prompt's own, and the cache would seem full four times
over."""


class FullCache(ScriptedEngine):
    """An engine like vLLM: it publishes nothing, reports how many tokens it holds, and evicts block by block."""

    def __init__(self) -> None:
        super().__init__(None, self._complete)
        self._cache: OrderedDict[object, None] = OrderedDict()
        self.stays = True
        """Whether the engine continues when the gateway that it was started for ends."""

    async def stop(self) -> None:
        if not self.stays:
            await super().stop()

    def _more_routes(self, app: web.Application) -> None:
        app.router.add_get("/metrics", self._metrics)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=vllm_page([Load()], blocks=BLOCKS, block_size=BLOCK))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        prompt = orjson.loads(self.received[-1].body)["prompt"]
        tokens = int(len(prompt) * TOKENS_PER_BYTE)
        blocks: list[object] = [prompt[: int(end / TOKENS_PER_BYTE)] for end in range(BLOCK, tokens, BLOCK)]
        held = next((i for i, block in enumerate(blocks) if block not in self._cache), len(blocks))
        for block in (object(), *reversed(blocks)):  # the last block is not whole, so no other prompt has it
            self._cache[block] = None
            self._cache.move_to_end(block)
        while len(self._cache) > BLOCKS:
            self._cache.popitem(last=False)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in (event("x"), usage_event(tokens, 1, held * BLOCK), b"data: [DONE]\n\n"):
            await response.write(chunk)
        return response


@contextlib.asynccontextmanager
async def engines() -> AsyncIterator[list[FullCache]]:
    both = [FullCache() for _ in range(2)]
    try:
        yield both
    finally:
        for engine in both:
            engine.stays = False
            await engine.stop()


@contextlib.asynccontextmanager
async def gateway(redis: RedisServer, both: list[FullCache]) -> AsyncIterator[Gateway]:
    """Yield a gateway that is ready and knows the engines' capacity."""
    async with running(*both, policy="round_robin", redis_url=redis.url, queue_timeout_s=0) as started:
        await eventually(lambda: started.app[READINESS].is_warm)
        await eventually(lambda: all(pod.facts.kv_capacity_tokens for pod in started.app[FLEET].pods("m")))
        yield started


async def ask(gateway: Gateway, prompt: str) -> None:
    fields = {"model": "m", "prompt": prompt, "max_tokens": 1, "stream": True}
    answer = await gateway.post({**fields, "stream_options": {"include_usage": True}})
    assert answer.status == 200


async def predicted(gateway: Gateway, prompt: str) -> tuple[int, dict[str, int]]:
    """Return the gateway's estimate of the prompt's tokens, and of how many of them each pod holds."""
    said = (await gateway.post({"model": "m", "prompt": prompt}, path="/v1/route/explain")).json
    return said["prompt_tokens_estimated"], {pod["pod"]: pod["view"]["matched_tokens"] for pod in said["pods"]}


PREFIX_TEXTS = [f"{i:03}" + random.Random(i).randbytes(PREFIX_BYTES // 2).hex() for i in range(PREFIXES)]


@pytest.mark.parametrize("stays", [False, True], ids=["after", "beside"])
async def test_a_new_gateway_is_as_good_as_the_one_before_it(redis_server: RedisServer, stays: bool) -> None:
    """It believes the same of each pod, although it has seen no answer that shows the tokens per key. It has the same
    constants of the pods' speed and caches, and makes the same predictions."""
    rng = random.Random(5)
    async with engines() as both, contextlib.AsyncExitStack() as stack:
        old = await stack.enter_async_context(gateway(redis_server, both))
        for number in range(REQUESTS):
            await ask(old, PREFIX_TEXTS[number * PREFIXES // REQUESTS] + rng.randbytes(20).hex())
        known, index, pods = assumed(old), old.app[INDEX], old.app[FLEET].pods("m")
        pool, rooms = pods[0].state.speed.pool.learnt, {pod.pod_id: index.learnt_capacity(pod.pod_id) for pod in pods}
        predictions = [await predicted(old, text) for text in PREFIX_TEXTS]
        assert pool is not None
        assert [len(keys) for keys in known.values()] == 2 * [PREFIXES * (PREFIX_BYTES // 256)]
        if stays:
            async with connect(redis_server.url) as redis:
                for _ in range(600):
                    data: Any = await redis.hget(LEARNT_KEY, "m")
                    if data is not None and decode_learnt(data)[0].speeds == {"unknown": pool}:
                        break
                    await asyncio.sleep(0.1)
            await eventually(lambda: not sharing(old).status().waiting)
        else:
            await stack.aclose()
        async with gateway(redis_server, both) as new:
            for pod in new.app[FLEET].pods("m"):
                assert pod.state.speed.pool.learnt == pool
                assert new.app[INDEX].learnt_capacity(pod.pod_id) == rooms[pod.pod_id]
            assert assumed(new) == known
            assert [await predicted(new, text) for text in PREFIX_TEXTS] == predictions
