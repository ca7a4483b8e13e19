"""What a gateway believes of a real vLLM from its KV events, compared with the cache that the same events rebuild."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from engine.contract.keys import key_seed, prefix_keys
from router.settings.gateway import GatewaySettings
from router.startup.app import build_app
from router.startup.parts import EVENTS, FLEET, INDEX, STREAMS
from router.startup.serving import make_runner
from tests.router.rig.helpers import eventually
from tests.vllm.conftest import StartServers
from tests.vllm.frames import Frames, Subscription, decoded, subscribed
from tests.vllm.servers import BLOCK_TOKENS, MODEL, ServerSpec, VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

STRIDE = 256
LEAST_RIGHT = 0.97
"""The share of keys that must be believed rightly. Several kinds of traffic reached 99 to 100 %; see router/events."""
REQUESTS, PREFIXES = 72, 24
REQUEST_S = 60.0
READY_S = 30.0


@pytest.fixture(scope="module")
def server(start_servers: StartServers) -> Iterator[VllmServer]:
    """A server with room for less than half of the prefixes, but for any single prompt in any tokenization."""
    with start_servers(ServerSpec(max_model_len=8192)) as (only,):
        yield only


class Cache:
    """A server's prefix cache, rebuilt from its events: blocks by parent and tokens, with a count of copies."""

    def __init__(self) -> None:
        self._copies: Counter[int] = Counter()
        self._children: dict[tuple[int | None, tuple[int, ...]], int] = {}

    def enter(self, messages: Iterable[Frames]) -> None:
        """Apply the messages published next."""
        for event in (event for frames in messages for event in decoded(frames).events):
            if event["type"] == "AllBlocksCleared":
                self._copies.clear()
            elif event["type"] == "BlockRemoved":
                self._copies.subtract(event["block_hashes"])
            else:
                parent = event.get("parent_block_hash")
                for number, block in enumerate(event["block_hashes"]):
                    tokens = event["token_ids"][number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
                    self._children[parent, tuple(tokens)] = block
                    self._copies[block] += 1
                    parent = block

    def held(self, tokens: Sequence[int]) -> int:
        """Return how many whole blocks at the beginning of `tokens` are in the cache."""
        block, count = None, 0
        for at in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            block = self._children.get((block, tuple(tokens[at : at + BLOCK_TOKENS])))
            if block is None or self._copies[block] <= 0:
                break
            count += 1
        return count


def prompts() -> list[str]:
    """Return long shared prefixes with short ends: code and prose of this repository, with tokens of uneven lengths."""
    root = Path(__file__).resolve().parents[2]
    files = sorted((root / "router").glob("**/*.py"))[:60] + sorted(root.glob("router/**/*.md"))
    text = "\n".join(file.read_text() for file in files).encode("ascii", "ignore").decode()
    rng = random.Random(1)

    def piece(size: int) -> str:
        start = rng.randrange(len(text) - size)
        return text[start : start + size]

    shared = [piece(rng.randrange(3_500, 5_500)) for _ in range(PREFIXES)]
    return [f"{rng.choice(shared)}\n\nQ{at}: {piece(rng.randrange(100, 700))}" for at in range(REQUESTS)]


def tokenized(server: VllmServer, prompt: str) -> tuple[list[int], list[int]]:
    """Return the token ids, and the position in bytes at which each token ends in the prompt."""
    said = server.post("/tokenize", {"model": MODEL, "prompt": prompt, "return_token_strs": True})
    ends, end = [], 0
    for token in said["token_strs"]:  # a byte-level vocabulary has a letter for each byte
        end += len(token)
        ends.append(end)
    assert end == len(prompt.encode())
    return said["tokens"], ends


@contextlib.asynccontextmanager
async def gateway(server: VllmServer) -> AsyncIterator[tuple[web.Application, str]]:
    """Yield a gateway in this process that follows the server's events, and its address."""
    app = build_app(
        GatewaySettings(
            engines=[server.url],
            admin_port=None,
            kv_events_port=server.events_port,
            kv_events_replay_port=server.replay_port,
        )
    )
    runner = make_runner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        await eventually(lambda: len(app[FLEET].admitted()) == 1, READY_S)
        (pod,) = app[FLEET].admitted()
        await eventually(lambda: app[STREAMS].state(pod.pod_id) not in ("none", "unheard"), READY_S)
        yield app, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def complete(url: str, texts: Iterable[str]) -> None:
    """Send all prompts, three at a time."""
    turns = asyncio.Semaphore(3)
    timeout = aiohttp.ClientTimeout(total=REQUEST_S)
    async with aiohttp.ClientSession(timeout=timeout) as http, asyncio.TaskGroup() as tasks:

        async def one(text: str) -> None:
            body = {"model": MODEL, "prompt": text, "max_tokens": 8, "temperature": 0.0}
            async with turns, http.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()

        for text in texts:
            tasks.create_task(one(text))


def compared(app: web.Application, server: VllmServer, cache: Cache, texts: Iterable[str]) -> Counter[str]:
    """Count all keys, the held keys, and the keys about which the gateway believes rightly."""
    (pod,) = app[FLEET].admitted()
    now_s = asyncio.get_running_loop().time()
    seen: set[int] = set()
    found: Counter[str] = Counter()
    for text in texts:
        keys = prefix_keys(text.encode(), key_seed(MODEL), STRIDE)
        match = app[INDEX].match(keys, now_s).get(pod.pod_id)
        tokens, ends = tokenized(server, text)
        blocks = cache.held(tokens)
        for at, key in enumerate(keys):
            if key in seen:
                continue
            seen.add(key)
            covered = sum(end <= (at + 1) * STRIDE for end in ends)
            is_held = max(1, covered // BLOCK_TOKENS) <= blocks
            is_believed = match is not None and at < match.strides
            found["keys"] += 1
            found["held"] += is_held
            found["right"] += is_held == is_believed
    return found


async def played(server: VllmServer, subscription: Subscription) -> None:
    """Send more than the cache has room for through a gateway; then empty the cache."""
    cache, texts = Cache(), prompts()
    async with gateway(server) as (app, url):
        (pod,) = app[FLEET].admitted()
        await complete(url, texts)
        cache.enter(await asyncio.to_thread(subscription.until_quiet))
        assert app[EVENTS].reports(pod.pod_id)
        found = compared(app, server, cache, texts)
        print(f"{found['right'] / found['keys']:.2%} of {found['keys']} keys are right, {found['held']} are held")
        assert found["held"] >= 100, found
        assert found["keys"] - found["held"] >= 100, found
        assert found["right"] >= LEAST_RIGHT * found["keys"], found

        await asyncio.to_thread(server.reset_cache)
        await complete(url, ["x"])  # the event comes with the next step
        await eventually(lambda: not any(app[INDEX].held(pod.pod_id).values()))


def test_belief_is_what_the_cache_holds(server: VllmServer) -> None:
    with subscribed(server) as subscription:
        asyncio.run(played(server, subscription))
