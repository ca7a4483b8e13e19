"""What a real vLLM does when it leaves, sleeps, is full or dies, and that clients of the gateway see nothing of it.

The tests use up the servers that they share, in this order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import aiohttp
import pytest

from tests.cluster.traffic import Journal, Outcome, traffic
from tests.e2e.programs import Program
from tests.redis_server import RedisServer
from tests.vllm.conftest import StartServers
from tests.vllm.servers import MODEL, ServerSpec, VllmServer
from tests.vllm.table import gateways

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SPEC = ServerSpec(max_num_seqs=8, flags=("--shutdown-timeout", "60", "--max-num-queued-reqs", "8"))
RATE = 2.0
SOON_S = 20.0
"""A fault must be over for clients by then, on a slow machine; one that is only found by a timeout takes minutes."""


@pytest.fixture(scope="module")
def all_servers(start_servers: StartServers) -> Iterator[list[VllmServer]]:
    """Three, of which the last tests leave one."""
    with start_servers(SPEC, SPEC, SPEC) as servers:
        yield servers


@pytest.fixture
def alive(all_servers: list[VllmServer]) -> list[VllmServer]:
    """Those that answer."""
    return [server for server in all_servers if server.answers()]


@pytest.fixture
def gateway(alive: list[VllmServer], redis: RedisServer) -> Iterator[Program]:
    """A gateway before those that answer."""
    with gateways(alive, 1, "predicted_ttft", redis.url) as (program,):
        yield program


@contextlib.asynccontextmanager
async def clients(gateway: Program) -> AsyncIterator[Journal]:
    """Clients who ask all the time; none of them may lose an answer."""
    async with traffic(gateway.url, model=MODEL, rate=RATE, policies=("",)) as journal:
        await until_served(journal, 4)
        yield journal
    assert set(journal.outcomes()) == {Outcome.WHOLE}, journal.of(Outcome.LOST) + journal.of(Outcome.CUT)


async def until_served(journal: Journal, more: int) -> None:
    """So many further answers have ended."""
    wanted = len(journal.records) + more

    async def are_there() -> bool:
        return len(journal.records) >= wanted

    await until(are_there, 120.0)


async def until(is_so: Callable[[], Awaitable[bool]], deadline_s: float) -> None:
    """Ask until it is so."""
    async with asyncio.timeout(deadline_s):
        while True:
            if await is_so():
                return
            await asyncio.sleep(0.05)


async def pods(gateway: Program) -> dict[str, dict[str, object]]:
    """What the gateway tells of each pod, by URL."""
    async with aiohttp.ClientSession() as http, http.get(f"{gateway.admin}/v1/pods") as answer:
        return {pod["url"]: pod for pod in (await answer.json())["pods"]}


def name(server: VllmServer) -> str:
    """The pod's id."""
    return server.url.removeprefix("http://")


async def test_usage_in_every_chunk_is_counted_once(gateway: Program) -> None:
    body = {"model": MODEL, "prompt": "The harbour office opens at nine. " * 60, "max_tokens": 6, "ignore_eos": True}
    async with aiohttp.ClientSession() as http:
        for _ in range(2):
            async with http.post(f"{gateway.url}/v1/completions", json={**body, "stream": True}) as answer:
                lines = [line async for line in answer.content if line.startswith(b"data: {")]
        usages = [json.loads(line[6:]).get("usage") for line in lines]
        assert sum(usage is not None for usage in usages) > 1, "this server says usage once: the test shows nothing"
        final = usages[-1]
        async with http.get(f"{gateway.admin}/metrics") as answer:
            page = await answer.text()
    assert final["prompt_tokens_details"]["cached_tokens"] > 0
    counted = sum(
        float(line.rpartition(" ")[2])
        for line in page.splitlines()
        if line.startswith("warmroute_gateway_tokens_total") and 'kind="cached"' in line
    )
    assert counted == final["prompt_tokens_details"]["cached_tokens"]


async def test_a_reset_while_blocks_are_in_use_does_not_forget_a_warm_cache(
    gateway: Program, alive: list[VllmServer]
) -> None:
    body = {"model": MODEL, "prompt": "Count on. " * 40, "max_tokens": 3000, "stream": True, "ignore_eos": True}
    async with aiohttp.ClientSession() as http:
        async with http.post(f"{alive[0].url}/v1/completions", json=body) as stream:
            await stream.content.readline()
            refused = await asyncio.to_thread(alive[0].post, "/reset_prefix_cache")
            assert refused == {"success": False}
            async with http.post(f"{gateway.admin}/reset_prefix_cache") as reset:
                assert reset.status == 502, await reset.text()
                assert name(alive[0]) in await reset.text()
        async with http.post(f"{gateway.admin}/reset_prefix_cache") as reset:
            assert reset.status == 200, await reset.text()


async def test_what_sleeps_is_found_in_seconds_and_used_again_when_awake(
    gateway: Program, alive: list[VllmServer]
) -> None:
    sleeper = alive[0]

    async def is_left() -> bool:
        return not (await pods(gateway))[sleeper.url]["admitted"]

    async def is_back() -> bool:
        return not await is_left()

    async with clients(gateway) as journal:
        await asyncio.to_thread(sleeper.post, "/sleep?level=1")
        await until(is_left, SOON_S)
        asleep = len(journal.records)
        await until_served(journal, 10)
        assert name(sleeper) not in {record.pod for record in journal.records[asleep + 6 :]}
        assert max(record.ended_s - record.started_s for record in journal.records) < 3 * SOON_S
        await asyncio.to_thread(sleeper.post, "/wake_up")
        await until(is_back, SOON_S)


async def test_full_servers_are_not_taken_for_broken(gateway: Program, alive: list[VllmServer]) -> None:
    body = {"model": MODEL, "prompt": "Count on. " * 40, "max_tokens": 24, "ignore_eos": True}
    places = len(alive) * (SPEC.max_num_seqs + 8)

    async def one(http: aiohttp.ClientSession, number: int) -> int:
        asked = {**body, "prompt": f"{number} {body['prompt']}"}
        async with http.post(f"{gateway.url}/v1/completions", json=asked) as answer:
            await answer.read()
            return answer.status

    timeout, connector = aiohttp.ClientTimeout(total=300), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        statuses = await asyncio.gather(*[one(http, number) for number in range(2 * places)])
    assert set(statuses) <= {200, 429}, statuses
    assert statuses.count(200) >= places
    assert not any(pod["ejected"] for pod in (await pods(gateway)).values())


async def test_a_killed_core_breaks_no_stream(gateway: Program, alive: list[VllmServer]) -> None:
    victim = alive[-1]

    async def works() -> bool:
        return bool((await pods(gateway))[victim.url]["in_flight"])

    async with clients(gateway) as journal:
        await until(works, 120.0)
        os.kill(victim.core_pid, signal.SIGKILL)
        await until_served(journal, 12)


async def test_a_draining_server_costs_no_client_an_answer(gateway: Program, alive: list[VllmServer]) -> None:
    leaver = alive[-1]
    async with clients(gateway) as journal:
        os.kill(leaver.pid, signal.SIGTERM)
        await until_served(journal, 12)
        assert not (await pods(gateway)).get(leaver.url, {}).get("ejected")
    leaver.process.wait(90)
