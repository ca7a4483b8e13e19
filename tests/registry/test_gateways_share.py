"""Gateways before engines that publish nothing share what they know of them, over a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import OrderedDict
from collections.abc import AsyncIterator

import orjson
import pytest
from aiohttp import web

from router.app import FLEET, INDEX, SHARING
from router.gateway.sharing import Sharing
from router.routing.types import PodId
from tests.redis_server import RedisServer
from tests.router.gateway.helpers import Gateway, ScriptedEngine, eventually, running

BLOCK = 256
TOKENS = BLOCK // 4


class SmallCache(ScriptedEngine):
    """An engine that publishes nothing and keeps `blocks` blocks of prompts, least recently used last."""

    def __init__(self, blocks: int, *, token_s: float = 0.0) -> None:
        super().__init__(None, self._complete)
        self._blocks = blocks
        self._token_s = token_s
        self._cache: OrderedDict[str, None] = OrderedDict()
        self._turn = asyncio.Lock()
        self.prompt_tokens = self.cached_tokens = 0

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        prompt = orjson.loads(self.received[-1].body)["prompt"]
        keys = [prompt[:end] for end in range(BLOCK, len(prompt) + 1, BLOCK)]
        async with self._turn:
            held = len(list(itertools.takewhile(self._cache.__contains__, keys)))
            for key in reversed(keys):
                self._cache[key] = None
                self._cache.move_to_end(key)
            while len(self._cache) > self._blocks:
                self._cache.popitem(last=False)
            await asyncio.sleep(self._token_s * (len(keys) - held) * TOKENS)
        total, cached = len(keys) * TOKENS, held * TOKENS
        self.prompt_tokens += total
        self.cached_tokens += cached
        usage = {
            "prompt_tokens": total,
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": cached} if cached else None,
        }
        return web.json_response({"object": "text_completion", "choices": [{"index": 0, "text": "x"}], "usage": usage})


@contextlib.asynccontextmanager
async def gateways(
    redis_server: RedisServer, count: int, *engines: ScriptedEngine, **settings: object
) -> AsyncIterator[list[Gateway]]:
    async with contextlib.AsyncExitStack() as stack:
        values = {"policy": "predicted_ttft", "redis_url": redis_server.url, "queue_timeout_s": 0, **settings}
        started = [await stack.enter_async_context(running(*engines, **values)) for _ in range(count)]
        for gateway in started:
            await eventually(lambda gateway=gateway: len(sharing(gateway).status().gateways) == count - 1)
        yield started


def sharing(gateway: Gateway) -> Sharing:
    found = gateway.app[SHARING]
    assert isinstance(found, Sharing)
    return found


def believed(gateway: Gateway) -> dict[PodId, set[int]]:
    index = gateway.app[INDEX]
    return {
        pod.pod_id: {key for _, keys in index.believed(pod.pod_id) for key in keys}
        for pod in gateway.app[FLEET].pods("m")
    }


def prompts(seed: int, count: int, prefixes: int = 24, blocks: int = 23) -> list[str]:
    rng = random.Random(seed)
    heads = [f"{i:03}" + rng.randbytes(blocks * BLOCK // 2).hex()[: blocks * BLOCK - 3] for i in range(prefixes)]
    return [rng.choice(heads) + rng.randbytes(BLOCK).hex() for _ in range(count)]


async def ask(gateway: Gateway, prompt: str, **fields: object) -> None:
    answer = await gateway.post({"model": "m", "prompt": prompt, "max_tokens": 1, **fields})
    assert answer.status == 200


async def hit_rate(redis_server: RedisServer, count: int, seed: int, at_a_time: int = 3) -> float:
    """Of one burst of requests over so many gateways, in turn."""
    engines = [SmallCache(320, token_s=2e-5) for _ in range(2)]
    with contextlib.ExitStack():
        async with gateways(redis_server, count, *engines) as started:
            slots = asyncio.Semaphore(at_a_time)

            async def one(i: int, prompt: str) -> None:
                async with slots:
                    await ask(started[i % count], prompt)

            await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts(seed, 192))))
    return sum(e.cached_tokens for e in engines) / sum(e.prompt_tokens for e in engines)


@pytest.mark.parametrize("seed", [1, 2])
async def test_two_gateways_hit_what_one_does(redis_server: RedisServer, seed: int) -> None:
    alone = await hit_rate(redis_server, 1, seed)
    both = await hit_rate(redis_server, 2, seed)
    print(alone, both)
    assert both > alone - 0.02
