"""How, and how soon, the gateway reacts to a real vLLM's own words (full, in use, asleep, shutting down, dead).

The tests run in this order, on three servers: the last tests end two of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import orjson
import pytest

from engine.common.sse import SseDecoder
from engine.contract.requests import Endpoint
from tests.e2e.programs import Program
from tests.redis_server import RedisServer
from tests.vllm.conftest import StartServers
from tests.vllm.servers import MODEL, ServerSpec, VllmServer
from tests.vllm.table import gateway
from tests.vllm.traffic import Traffic, stream

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

FOUND_S = 8.0
"""Seconds that suffice for probes every 2 s with a jitter of one fifth, for one answer, and on a busy machine."""
TRAFFIC_S = 60.0
"""Seconds that a busy machine may take for a few short streams."""
DRAINED_S = 330.0
"""Seconds; more than a server's --shutdown-timeout."""


@pytest.fixture(scope="module")
def three(start_servers: StartServers) -> Iterator[list[VllmServer]]:
    """Three servers: one with default settings, two in development mode. The first takes two requests at a time."""
    plain = ServerSpec(flags=("--shutdown-timeout", "300"), environ={"VLLM_SERVER_DEV_MODE": "0"})
    with start_servers(plain, ServerSpec(flags=("--max-num-queued-reqs", "2")), ServerSpec()) as servers:
        yield servers


class Front:
    """A gateway in front of some of the servers, and what it reports about its pods."""

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
        """Return the seconds until `condition` is true. Raise AssertionError if that takes more than `within_s`."""
        began_s = time.monotonic()
        while not await condition():
            assert time.monotonic() - began_s < within_s, "the gateway has not noticed"
            await asyncio.sleep(0.05)
        return time.monotonic() - began_s

    async def begin(self, server: VllmServer, tokens: int) -> asyncio.Task[dict[str, Any]]:
        """Begin a stream of `tokens` tokens, and return once this server has given the first token."""
        name = server.url.removeprefix("http://")
        for number in range(20):
            pod: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            call = asyncio.create_task(
                stream(self.http, self.program.url, f"long {number} " * 20, tokens, on_pod=pod.set_result)
            )
            waited: list[asyncio.Future[Any]] = [call, pod]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not pod.done():
                await call  # this raises the call's error
            if pod.result() == name:
                return call
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        raise AssertionError(f"no request went to {name}")

    async def until_busy(self, server: VllmServer) -> None:
        """Wait until the gateway has a request at this server."""

        async def is_busy() -> bool:
            return int((await self.pod(server))["in_flight"]) > 0

        await self.until(is_busy, TRAFFIC_S)

    async def until_done(self, traffic: Traffic, more: int) -> None:
        """Wait until `more` further streams of the traffic have ended."""
        wanted = traffic.done + more

        async def are_done() -> bool:
            return traffic.done >= wanted

        await self.until(are_done, TRAFFIC_S)

    async def check_no_noise(self) -> None:
        assert await self.metric("warmroute_gateway_ejections_total") == 0
        assert await self.metric("warmroute_gateway_engine_ejected") == 0


@contextlib.asynccontextmanager
async def before(servers: list[VllmServer], redis: RedisServer, *flags: str) -> AsyncIterator[Front]:
    """Yield a gateway in front of the servers that are left."""
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
        print(program.output())
        program.stop()


@pytest.fixture
async def front(three: list[VllmServer], redis: RedisServer) -> AsyncIterator[Front]:
    """A gateway that uses the servers in turn."""
    async with before(three, redis) as made:
        yield made


async def test_a_full_server_is_full_and_not_broken(three: list[VllmServer], redis: RedisServer) -> None:
    async with before(three, redis, "--queue-timeout-s", "0") as front:  # no queue, so that the server fills

        async def was_full() -> bool:
            return await front.metric('warmroute_gateway_retries_total{reason="status"}') > 0

        async with Traffic(front.program.url, 16) as traffic:
            await front.until(was_full, TRAFFIC_S)
            await front.until_done(traffic, 64)
        pod = await front.pod(three[1])
        assert traffic.failures == []
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

    short = await front.begin(three[1], 100)
    assert await reset() == "ok", "the gateway repeated the reset until the stream had ended"
    await asyncio.wait_for(short, 2.0)
    long = await front.begin(three[1], 3500)
    said = await reset()
    assert not long.done(), "the machine is too fast for this test"
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
        await front.until_busy(three[1])
        await asyncio.to_thread(three[1].post, "/sleep?level=1")
        found_s = await front.until(lambda: is_in(False))
        await front.until_done(traffic, 8)
        await asyncio.to_thread(three[1].post, "/wake_up")
        woken_s = await front.until(lambda: is_in(True))
        await front.until_busy(three[1])
    print(f"asleep: found after {found_s:.1f} s, awake after {woken_s:.1f} s, slowest {traffic.slowest_s:.1f} s")
    assert traffic.failures == []
    assert traffic.slowest_s < FOUND_S + 10.0
    await front.check_no_noise()


BEFORE_TOKEN = "word " * 3500
"""A prompt of more tokens than vLLM computes in one step."""


def asks(endpoint: Endpoint, number: int) -> dict[str, Any]:
    """Return a request for a stream. A server put to sleep at once gives it up before its first token."""
    prompt = f"{number} {endpoint} {BEFORE_TOKEN}"
    fields: dict[str, Any] = {"model": MODEL, "stream": True, "temperature": 0.0}
    if endpoint is Endpoint.RESPONSES:
        return {**fields, "input": prompt, "max_output_tokens": 8}
    if endpoint is Endpoint.COMPLETIONS:
        return {**fields, "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
    return {**fields, "messages": [{"role": "user", "content": prompt}], "max_tokens": 8}


def check_told(events: list[bytes], endpoint: Endpoint) -> None:
    """Check that the stream has tokens and exactly one end."""
    parsed = [orjson.loads(event) for event in events if event != b"[DONE]"]
    if endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS):
        choices = [choice for event in parsed for choice in event["choices"]]
        reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        assert len(reasons) == 1, events
        assert reasons[0] in ("stop", "length")
        assert events.count(b"[DONE]") == 1
        return
    kinds = Counter(event["type"] for event in parsed)
    if endpoint is Endpoint.MESSAGES:
        ends, usage = kinds["message_stop"], next(e["usage"] for e in parsed if e["type"] == "message_delta")
        assert (kinds["message_start"], kinds["message_delta"]) == (1, 1), kinds
    else:
        ends, usage = kinds["response.completed"] + kinds["response.incomplete"], parsed[-1]["response"]["usage"]
        assert kinds["response.created"] == 1, kinds
    assert ends == 1, kinds
    assert usage["output_tokens"] > 0


@pytest.mark.parametrize("endpoint", [Endpoint.COMPLETIONS, Endpoint.CHAT, Endpoint.MESSAGES, Endpoint.RESPONSES])
async def test_what_a_server_gives_up_before_the_first_token_comes_from_elsewhere(
    three: list[VllmServer], redis: RedisServer, endpoint: Endpoint
) -> None:
    """The only sign of a server that gave up is an answer without tokens."""
    sleeps, stays = three[2], three[0]  # neither server is ever full

    async def ask(front: Front, number: int) -> list[bytes]:
        async with front.http.post(front.program.url + endpoint, json=asks(endpoint, number)) as answer:
            assert answer.status == 200, await answer.text()
            return list(SseDecoder().feed(await answer.read()))

    async def computes() -> bool:
        """Whether the core has some of the requests, whose prompts it reads in a few steps."""
        return await asyncio.to_thread(sleeps.metric, "vllm:num_requests_running") > 0

    async with before([sleeps, stays], redis) as front:

        async def is_in() -> bool:
            return bool((await front.pod(sleeps))["admitted"])

        calls = [asyncio.create_task(ask(front, number)) for number in range(6)]
        try:
            await front.until(computes, TRAFFIC_S)
            await asyncio.to_thread(sleeps.post, "/sleep?level=1")
            told = await asyncio.wait_for(asyncio.gather(*calls), TRAFFIC_S)
        finally:
            await asyncio.to_thread(sleeps.post, "/wake_up")
        given_up = await front.metric("warmroute_gateway_retries_total")
        given_up += await front.metric('warmroute_gateway_broken_attempts_total{then="resumed"}')
        await front.check_no_noise()
        await front.until(is_in, 30.0)
    for events in told:
        check_told(events, endpoint)
    assert given_up > 0, "it ended too soon: the test shows nothing"


async def test_a_server_that_drains_is_left_at_its_first_word(front: Front, three: list[VllmServer]) -> None:
    drains = three[0]
    name = drains.url.removeprefix("http://")

    async def leaves() -> bool:
        pod = await front.pod(drains)
        return bool(pod.get("leaving")) or not pod["admitted"]

    async def has_only_the_long_one() -> bool:
        return int((await front.pod(drains))["in_flight"]) <= 1

    async def has_ended() -> bool:
        return not await asyncio.to_thread(drains.answers)

    try:
        async with Traffic(front.program.url, 4) as traffic:
            long = await front.begin(drains, 3000)
            os.kill(drains.pid, signal.SIGTERM)
            left_s = await front.until(leaves)
            await front.until(has_only_the_long_one)
            answered = await front.metric(f'warmroute_gateway_requests_total{{engine="{name}"')
            await front.until_done(traffic, 8)
            assert not long.done(), "it ended too soon: the test shows nothing"
            assert await asyncio.to_thread(drains.answers)
            assert not (await front.pod(drains))["failed_in_a_row"]
            assert await front.metric(f'warmroute_gateway_requests_total{{engine="{name}"') == answered
            usage = await long
        print(f"draining: left after {left_s:.2f} s, {traffic.done} streams, slowest {traffic.slowest_s:.1f} s")
        assert usage["completion_tokens"] == 3000
        assert traffic.failures == []
        await front.check_no_noise()
    finally:
        await front.until(has_ended, DRAINED_S)  # otherwise the next test would use the server


async def test_a_core_that_is_killed_costs_no_stream(front: Front, three: list[VllmServer]) -> None:
    killed = three[1]
    core_pid = killed.core_pid

    async def is_out() -> bool:
        pod = await front.pod(killed)
        return bool(pod.get("leaving")) or not pod["admitted"]

    async with Traffic(front.program.url, 4) as traffic:
        long = await front.begin(killed, 2000)
        os.kill(core_pid, signal.SIGKILL)  # at the first token: a starved test may miss hundreds of later ones
        assert not long.done(), "it ended too soon: the test shows nothing"
        out_s = await front.until(is_out)
        usage = await long
        await front.until_done(traffic, 8)
    print(f"killed: left after {out_s:.2f} s, {traffic.done} streams, slowest {traffic.slowest_s:.1f} s")
    assert usage["completion_tokens"] >= 2000 / 2, "another server gave the rest"
    assert traffic.failures == []
    assert await front.metric('warmroute_gateway_broken_attempts_total{then="resumed"}') > 0
    await front.check_no_noise()
