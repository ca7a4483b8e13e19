"""Named caches in front of real vLLM servers: requests that name a cache reuse what one client stored once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import aiohttp
import pytest

from engine.contract import headers
from tests.redis_server import RedisServer
from tests.vllm.conftest import StartServers
from tests.vllm.servers import BLOCK_TOKENS, MODEL, ServerSpec, VllmServer
from tests.vllm.table import gateways

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

HANDBOOK = "You answer for the harbour office, briefly, and quote its handbook. " * 60
QUESTIONS = ("Where is berth 4?", "And when does it open?", "Who pays the pilot?", "May one anchor?")
CACHES = "/v1/caches"


@pytest.fixture(scope="module")
def pair(start_servers: StartServers) -> Iterator[list[VllmServer]]:
    """Two servers; the last test ends one of them."""
    with start_servers(ServerSpec(), ServerSpec()) as servers:
        yield servers


@dataclass
class Answer:
    """The result of a request."""

    status: int
    body: Any
    pod: str

    @property
    def prompt(self) -> tuple[int, int]:
        """Return the prompt tokens, and how many of them vLLM reused."""
        usage = self.body["usage"]
        details = usage["prompt_tokens_details"] or {}
        return usage["prompt_tokens"], details.get("cached_tokens") or 0

    @property
    def text(self) -> str:
        return str(self.body["choices"][0]["message"]["content"])


@dataclass
class Fronts:
    """Two gateways in front of both servers, with one store."""

    urls: list[str]
    http: aiohttp.ClientSession

    async def call(self, method: str, path: str, body: Any = None, *, gateway: int = 0) -> Answer:
        async with self.http.request(method, self.urls[gateway] + path, json=body) as answer:
            return Answer(answer.status, await answer.json(), answer.headers.get(headers.POD, ""))

    async def ask(self, question: str, name: str | None, *, gateway: int = 0) -> Answer:
        """Ask a question that follows the named cache. With `name` None, the request contains the contents itself."""
        messages = [{"role": "user", "content": question}]
        fields: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 0.0}
        if name is None:
            messages.insert(0, {"role": "system", "content": HANDBOOK})
        else:
            fields["cached_content"] = name
        return await self.call("POST", "/v1/chat/completions", {**fields, "messages": messages}, gateway=gateway)


@pytest.fixture
async def fronts(pair: list[VllmServer], redis: RedisServer) -> AsyncIterator[Fronts]:
    for server in pair:
        if server.answers():
            server.reset_cache()
    with gateways(pair, 2, "predicted_ttft", redis.url) as programs:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
            yield Fronts([program.url for program in programs], http)


async def create(fronts: Fronts, **fields: str) -> str:
    """Create a cache of the handbook, and return its name."""
    wanted = {"model": MODEL, "system": HANDBOOK, "ttl": "300s", **fields}
    made = await fronts.call("POST", CACHES, wanted)
    assert made.status == 200, made.body
    return str(made.body["name"])


async def test_a_cache_stored_once_is_reused_by_all_requests_that_name_it(fronts: Fronts) -> None:
    """Either gateway sends the request to the pod that has the cache. The answer is the same as to the whole prompt."""
    name = await create(fronts)
    pods = set()
    for number, question in enumerate(QUESTIONS):
        answer = await fronts.ask(question, name, gateway=number % 2)
        assert answer.status == 200, answer.body
        tokens, cached = answer.prompt
        if number:
            assert cached > 0.9 * tokens - BLOCK_TOKENS, f"{cached} of {tokens} tokens for the question {number}"
        else:
            assert cached == 0, "nobody has asked before"
        pods.add(answer.pod)
        spelt_out = await fronts.ask(question, None)
        assert (spelt_out.text, spelt_out.prompt[0]) == (answer.text, tokens)
    assert len(pods) == 1, "one pod has the cache, and another pod would compute it anew"


async def test_it_is_renewed_and_ends(fronts: Fronts) -> None:
    name = await create(fronts, ttl="60s")
    shown = (await fronts.call("GET", f"/v1/{name}", gateway=1)).body
    renewed = await fronts.call("PATCH", f"/v1/{name}", {"ttl": "600s"}, gateway=1)
    assert renewed.status == 200
    later = datetime.fromisoformat(renewed.body["expireTime"]) - datetime.fromisoformat(shown["expireTime"])
    assert 500 < later.total_seconds() < 660
    assert (await fronts.ask(QUESTIONS[0], name)).status == 200
    assert (await fronts.call("DELETE", f"/v1/{name}")).status == 200
    gone = await fronts.ask(QUESTIONS[0], name, gateway=1)
    assert (gone.status, gone.body["error"]["code"]) == (404, "cache_not_found")
    short = await create(fronts, ttl="2s")
    await asyncio.sleep(2.5)
    assert (await fronts.ask(QUESTIONS[0], short)).status == 404, "the cache has expired"


async def test_a_cache_is_made_again_if_its_pod_has_died(fronts: Fronts, pair: list[VllmServer]) -> None:
    """This test is the last of the file, because it ends a server."""
    name = await create(fronts)
    first, second = [await fronts.ask(question, name) for question in QUESTIONS[:2]]
    assert second.pod == first.pod
    assert second.prompt[1] > 0
    dying = next(server for server in pair if server.url.endswith(first.pod))
    await asyncio.to_thread(dying.stop)
    third, fourth = [await fronts.ask(question, name) for question in QUESTIONS[2:]]
    assert third.status == 200, third.body
    assert third.pod == fourth.pod != first.pod
    assert third.prompt[1] == 0, "the other pod has computed the contents anew"
    assert fourth.prompt[1] > 0.9 * fourth.prompt[0] - BLOCK_TOKENS
