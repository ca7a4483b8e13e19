"""Gateways share what they know about engines that publish nothing, over a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import OrderedDict
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import orjson
from aiohttp import web

from router.choosing.peer_setup import PeerSync
from router.startup.parts import FLEET, INDEX, PEER_SYNC, READINESS, SENT_REPORTS
from router.views.types import PodId
from tests.redis_server import RedisServer
from tests.router.rig.helpers import Gateway, ScriptedEngine, eventually, running, stalls_after

BLOCK = 256
TOKENS = BLOCK // 4


class SmallCache(ScriptedEngine):
    """An engine that publishes nothing and keeps the `blocks` blocks of prompts that were used last."""

    def __init__(self, blocks: int, *, token_s: float = 0.0) -> None:
        super().__init__(None, self._complete)
        self._blocks = blocks
        self._token_s = token_s
        self._cache: OrderedDict[str, None] = OrderedDict()
        self._turn = asyncio.Lock()
        self.prompt_tokens = self.cached_tokens = 0
        self.stays = False
        """Whether the engine continues when the gateway that it was started for ends."""

    async def stop(self) -> None:
        if not self.stays:
            await super().stop()

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
        values: dict[str, Any] = {
            "policy": "predicted_ttft",
            "redis_url": redis_server.url,
            "queue_timeout_s": 0,
            **settings,
        }
        started = [await stack.enter_async_context(running(*engines, **values)) for _ in range(count)]
        for gateway in started:
            await eventually(partial(hears_of, gateway, count - 1))
        yield started


def hears_of(gateway: Gateway, others: int) -> bool:
    return len(sharing(gateway).status().gateways) >= others


def assume_alike(one: Gateway, other: Gateway) -> bool:
    return assumed(one) == assumed(other)


def sharing(gateway: Gateway) -> PeerSync:
    found = gateway.app[PEER_SYNC]
    assert isinstance(found, PeerSync)
    return found


def assumed(gateway: Gateway) -> dict[PodId, set[int]]:
    index = gateway.app[INDEX]
    return {
        pod.pod_id: {key for _, keys in index.assumed(pod.pod_id) for key in keys}
        for pod in gateway.app[FLEET].pods("m")
    }


def prompts(seed: int, count: int, prefixes: int = 24, blocks: int = 23) -> list[str]:
    rng = random.Random(seed)
    heads = [f"{i:03}" + rng.randbytes(blocks * BLOCK // 2).hex()[: blocks * BLOCK - 3] for i in range(prefixes)]
    return [rng.choice(heads) + rng.randbytes(BLOCK).hex() for _ in range(count)]


async def ask(gateway: Gateway, prompt: str, **fields: object) -> None:
    answer = await gateway.post({"model": "m", "prompt": prompt, "max_tokens": 1, **fields})
    assert answer.status == 200


async def hit_rate(redis_server: RedisServer, count: int) -> float:
    """Return the hit rate of a fixed list of requests, sent to `count` gateways in turn. Each request waits until all
    gateways know about the previous request."""
    engines = [SmallCache(180) for _ in range(2)]
    async with gateways(redis_server, count, *engines, policy="cache_aware") as started:
        for i, prompt in enumerate(prompts(1, 40, prefixes=6, blocks=12)):
            asked = started[i % count]
            await ask(asked, prompt)
            for gateway in started:
                await eventually(partial(assume_alike, gateway, asked), 60.0)
    return sum(e.cached_tokens for e in engines) / sum(e.prompt_tokens for e in engines)


async def test_two_gateways_hit_what_one_does(redis_server: RedisServer) -> None:
    alone = await hit_rate(redis_server, 1)
    both = await hit_rate(redis_server, 2)
    assert both > alone - 0.02


async def test_a_new_gateway_knows_what_the_others_know_before_it_is_ready(redis_server: RedisServer) -> None:
    engines = [SmallCache(320) for _ in range(2)]
    async with gateways(redis_server, 1, *engines) as (first,):
        for prompt in prompts(2, 12):
            await ask(first, prompt)
        known = assumed(first)
        assert all(known.values())
        await eventually(lambda: not sharing(first).status().waiting)
        async with gateways(redis_server, 1, *engines) as (second,):
            await eventually(lambda: second.app[READINESS].is_warm)
            assert assumed(second) == known


async def test_assumptions_outlive_all_gateways(redis_server: RedisServer) -> None:
    engines = [SmallCache(320) for _ in range(2)]
    for engine in engines:
        engine.stays = True
    async with gateways(redis_server, 1, *engines) as (first,):
        for prompt in prompts(2, 12):
            await ask(first, prompt)
        known = assumed(first)
    for engine in engines:
        engine.stays = False
    async with gateways(redis_server, 1, *engines) as (second,):
        await eventually(lambda: second.app[READINESS].is_warm)
        assert assumed(second) == known


async def test_requests_in_flight_at_one_gateway_count_at_the_other(redis_server: RedisServer) -> None:
    engine = ScriptedEngine(None, stalls_after(begin=False))
    async with gateways(redis_server, 2, engine) as (first, second):
        heard: list[tuple[str, str]] = []
        second.app[SENT_REPORTS].listen(lambda pod, session, keys, tokens, at_s: heard.append((pod, session)))
        request = asyncio.create_task(ask(first, "x" * 1000, stream=True))
        (pod,) = second.app[FLEET].pods("m")
        clock = asyncio.get_running_loop().time
        await eventually(lambda: pod.state.requests(clock()) == 1)
        assert pod.in_flight == 0
        listed = (await second.get("/v1/pods")).json
        assert listed["pods"][0]["in_flight_of_others"] == 1
        assert len(listed["sharing"]["gateways"]) == 1
        await eventually(lambda: bool(engine.received))  # the other gateway may hear of it before the engine does
        assert heard == [(pod.pod_id, engine.received[0].headers["x-request-id"])]
        request.cancel()
        await asyncio.wait((request,))
        await eventually(lambda: pod.state.requests(clock()) == 0)
        # The request never ran, so neither gateway believes that the pod holds its prompt.
        await eventually(lambda: not any(assumed(first).values()) and not any(assumed(second).values()))


async def test_a_gateway_without_redis_says_that_it_does_not_share() -> None:
    async with running(SmallCache(10)) as gateway:
        assert (await gateway.get("/v1/pods")).json["sharing"]["sharing"] is False
