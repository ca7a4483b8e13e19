"""What the gateway makes of a real vLLM's own words (full, in use, asleep, shutting down, dead), and how soon.

In this order, on three servers: the last tests end two of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import pytest

from tests.e2e.programs import Program
from tests.redis_server import RedisServer
from tests.vllm.conftest import StartServers
from tests.vllm.servers import ServerSpec, VllmServer
from tests.vllm.table import gateway
from tests.vllm.traffic import Traffic, stream

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

FOUND_S = 8.0
"""A probe every 2 s, a fifth more by chance, one answer, and a busy machine."""


@pytest.fixture(scope="module")
def three(start_servers: StartServers) -> Iterator[list[VllmServer]]:
    """One as people run it, two in development mode, of which the first takes two requests at a time."""
    plain = ServerSpec(flags=("--shutdown-timeout", "120"), environ={"VLLM_SERVER_DEV_MODE": "0"})
    with start_servers(plain, ServerSpec(flags=("--max-num-queued-reqs", "2")), ServerSpec()) as servers:
        yield servers


class Front:
    """A gateway before some of them, and what it says of its pods."""

    def __init__(self, program: Program, http: aiohttp.ClientSession) -> None:
        self.program = program
        self.http = http

    async def pod(self, server: VllmServer) -> dict[str, Any]:
        async with self.http.get(f"{self.program.admin}/v1/pods") as answer:
            pods = (await answer.json())["pods"]
        return next(pod for pod in pods if pod["url"] == server.url)

    async def metric(self, name: str) -> float:
        async with self.http.get(f"{self.program.admin}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        begins = (name,) if "{" in name else (f"{name} ", f"{name}{{")
        return sum(float(line.split()[-1]) for line in lines if line.startswith(begins))

    async def until(self, condition: Callable[[], Awaitable[bool]], within_s: float = FOUND_S) -> float:
        """Seconds until it holds. Raises AssertionError where it does not in time."""
        began_s = time.monotonic()
        while not await condition():
            assert time.monotonic() - began_s < within_s, "the gateway has not seen it"
            await asyncio.sleep(0.05)
        return time.monotonic() - began_s

    async def begin(self, server: VllmServer, tokens: int) -> asyncio.Task[dict[str, Any]]:
        """A stream of so many tokens that this server has."""
        name = server.url.removeprefix("http://")
        for number in range(20):
            call = asyncio.create_task(stream(self.http, self.program.url, f"long {number} " * 20, tokens, name))
            await asyncio.sleep(1.0)
            if not call.done():
                return call
            await call
        raise AssertionError(f"no request went to {name}")

    async def check_no_noise(self) -> None:
        assert await self.metric("warmroute_gateway_ejections_total") == 0
        assert await self.metric("warmroute_gateway_engine_ejected") == 0


@contextlib.asynccontextmanager
async def before(servers: list[VllmServer], redis: RedisServer, *flags: str) -> AsyncIterator[Front]:
    """A gateway before those that are still there."""
    living = [server for server in servers if server.answers()]
    program = gateway(living, "round_robin", redis.url, *flags)
    try:
        await asyncio.to_thread(program.wait_ready)
        async with aiohttp.ClientSession() as http:
            made = Front(program, http)

            async def all_in() -> bool:
                pods = [await made.pod(server) for server in living]
                return all(pod["admitted"] for pod in pods)

            await made.until(all_in, 30.0)
            yield made
    finally:
        program.stop()


@pytest.fixture
async def front(three: list[VllmServer], redis: RedisServer) -> AsyncIterator[Front]:
    """A gateway that takes each in turn."""
    async with before(three, redis) as made:
        yield made


async def test_a_full_server_is_full_and_not_broken(three: list[VllmServer], redis: RedisServer) -> None:
    async with before(three, redis, "--queue-timeout-s", "0") as front:  # else the gateway's queue keeps it from that
        async with Traffic(front.program.url, 16) as traffic:
            await asyncio.sleep(8.0)
        pod = await front.pod(three[1])
        assert traffic.failures == []
        assert await front.metric('warmroute_gateway_retries_total{reason="status"}') > 0, "it never was full"
        assert (pod["admitted"], pod["failed_in_a_row"], pod["ejected"]) == (True, 0, False)
        await front.check_no_noise()


async def test_usage_in_every_event_is_counted_once(front: Front) -> None:
    usages = [await stream(front.http, front.program.url, "the same again " * 60, 5) for _ in range(9)]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert sum(cached) > 0
    assert await front.metric('warmroute_gateway_tokens_total{kind="cached",policy="round_robin"}') == sum(cached)
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    assert await front.metric('warmroute_gateway_tokens_total{kind="prompt",policy="round_robin"}') == prompts


async def test_a_reset_waits_for_the_blocks_in_use_and_else_says_so(front: Front, three: list[VllmServer]) -> None:
    name = three[1].url.removeprefix("http://")

    async def reset() -> str:
        async with front.http.post(f"{front.program.admin}/reset_prefix_cache") as answer:
            return str((await answer.json())["pods"][name])

    short = await front.begin(three[1], 250)
    assert await reset() == "ok", "repeated until the stream had ended"
    assert short.done()
    await short
    long = await front.begin(three[1], 3500)
    said = await reset()
    assert not long.done(), "it is too fast a machine for this test"
    assert "emptied nothing" in said
    long.cancel()
    await asyncio.gather(long, return_exceptions=True)
    assert await reset() == "ok"


async def test_a_server_that_sleeps_is_found_in_seconds_and_so_is_its_waking(
    front: Front, three: list[VllmServer]
) -> None:
    async def is_in(wanted: bool) -> bool:
        return bool((await front.pod(three[1]))["admitted"]) is wanted

    async with Traffic(front.program.url, 4) as traffic:
        await asyncio.sleep(1.0)
        await asyncio.to_thread(three[1].post, "/sleep?level=1")
        found_s = await front.until(lambda: is_in(False))
        await asyncio.sleep(2.0)
        await asyncio.to_thread(three[1].post, "/wake_up")
        woken_s = await front.until(lambda: is_in(True))
        await asyncio.sleep(1.0)
    print(f"asleep: found after {found_s:.1f} s, awake after {woken_s:.1f} s, slowest {traffic.slowest_s:.1f} s")
    assert traffic.failures == []
    assert traffic.slowest_s < FOUND_S + 10.0
    await front.check_no_noise()


async def test_a_server_that_drains_is_left_at_its_first_word(front: Front, three: list[VllmServer]) -> None:
    drains = three[0]
    name = drains.url.removeprefix("http://")

    async def leaves() -> bool:
        pod = await front.pod(drains)
        return bool(pod.get("leaving")) or not pod["admitted"]

    async with Traffic(front.program.url, 4) as traffic:
        long = await front.begin(drains, 1500)
        os.kill(drains.pid, signal.SIGTERM)
        left_s = await front.until(leaves)
        answered = await front.metric(f'warmroute_gateway_requests_total{{engine="{name}"')
        await asyncio.sleep(5.0)
        assert drains.answers(), "it ended too soon: the test shows nothing"
        assert not (await front.pod(drains))["failed_in_a_row"]
        assert await front.metric(f'warmroute_gateway_requests_total{{engine="{name}"') == answered
        usage = await long
    print(f"draining: left after {left_s:.2f} s, {traffic.done} streams, slowest {traffic.slowest_s:.1f} s")
    assert usage["completion_tokens"] == 1500
    assert traffic.failures == []
    await front.check_no_noise()


async def test_a_core_that_is_killed_costs_no_stream(front: Front, three: list[VllmServer]) -> None:
    killed = three[1]

    async def is_out() -> bool:
        pod = await front.pod(killed)
        return bool(pod.get("leaving")) or not pod["admitted"]

    async with Traffic(front.program.url, 4) as traffic:
        long = await front.begin(killed, 600)
        os.kill(killed.core_pid, signal.SIGKILL)
        out_s = await front.until(is_out)
        usage = await long
        await asyncio.sleep(3.0)
    print(f"killed: left after {out_s:.2f} s, {traffic.done} streams, slowest {traffic.slowest_s:.1f} s")
    assert usage["completion_tokens"] >= 600 / 2, "the rest came from elsewhere"
    assert traffic.failures == []
    assert await front.metric('warmroute_gateway_broken_attempts_total{then="resumed"}') > 0
    await front.check_no_noise()
