"""Faults on the whole path: real engine processes (emulated device), a real Redis, the real gateway application."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path
from typing import Any

import redis

from engine.contract.keys import key_seed, prefix_keys
from router.startup.parts import CHOOSER, INDEX
from router.views.types import PodId
from tests.conftest import wait_until
from tests.e2e.programs import Program, running
from tests.e2e.stack import PODS, Stack, gateway_before, wait_index_equal
from tests.redis_server import RedisServer, running_redis

TENANTS = [f"You are assistant number {i} of the service desk. " * 30 for i in range(6)]


def prompts(rng: random.Random, count: int) -> list[str]:
    return [
        f"{rng.choice(TENANTS)} Request {rng.random()}: {'please answer ' * rng.randrange(20)}" for _ in range(count)
    ]


async def test_after_a_quiet_second_the_index_equals_what_the_engines_hold(stack: Stack) -> None:
    rng = random.Random(1)
    asked = [f"{prompt} {rng.random()} {'and then some more ' * 30}" for prompt in prompts(rng, 240)]
    for start in range(0, len(asked), 40):
        answers = await asyncio.gather(*(stack.ask(prompt) for prompt in asked[start : start + 40]))
        assert {status for status, _ in answers} == {200}
    await asyncio.sleep(1.0)
    truth = await stack.held_by_engines()
    assert stack.held_by_index(list(truth)) == truth
    known = {key for prompt in asked for key in prefix_keys(prompt.encode(), key_seed("tiny"))}
    held = set().union(*truth.values())
    assert len(held) > 60
    assert held < known, "pools this small must have evicted some of the prefixes"


async def test_a_second_gateway_routes_to_the_warm_pod_at_once(stack: Stack) -> None:
    prompt = "A prefix that only one pod has seen so far. " * 20
    _, pod = await stack.ask(prompt + "first")
    await wait_index_equal(stack)
    async with gateway_before(stack.redis, stack.engines) as second:
        assert await second.ask(prompt + "second") == (200, pod)


async def test_no_request_fails_while_redis_is_flushed_stopped_and_restarted(stack: Stack) -> None:
    rng = random.Random(2)
    statuses: list[int] = []
    stop = asyncio.Event()

    async def traffic() -> None:
        while not stop.is_set():
            status, _ = await stack.ask(prompts(rng, 1)[0], max_tokens=4)
            statuses.append(status)

    async with asyncio.TaskGroup() as group:
        for _ in range(6):
            group.create_task(traffic())
        await asyncio.sleep(0.5)
        with redis.Redis.from_url(stack.redis.url) as client:
            client.flushall()
        await asyncio.sleep(0.5)
        stack.redis.stop()
        async with asyncio.timeout(10):
            while True:  # until lease and index have expired and requests are routed by hash
                async with stack.http.get(f"{stack.gateway}/ready") as ready:
                    assert ready.status == 200, "a lost Redis does not make the gateway unready"
                    if (await ready.json())["registry"]["expired"]:
                        break
                await asyncio.sleep(0.05)
        served = len(statuses)
        await asyncio.sleep(0.5)
        assert len(statuses) > served, "requests flow without Redis"
        stack.redis.start()
        await asyncio.sleep(1.0)
        stop.set()
    assert len(statuses) > 50
    assert set(statuses) == {200}
    await wait_index_equal(stack)


async def test_a_client_that_leaves_frees_its_blocks_in_the_engine(stack: Stack) -> None:
    body = {"model": "tiny", "prompt": "Leaving soon. " * 40, "max_tokens": 2000, "stream": True, "ignore_eos": True}
    async with stack.http.post(f"{stack.gateway}/v1/completions", json=body) as answer:
        await answer.content.readany()
        running_now = [await stack.metric(e, "vllm:num_requests_running") for e in stack.engines]
        assert sum(running_now) == 1
    # At the latest, the blocks are freed when the current step ends, which takes some milliseconds on this device.
    async with asyncio.timeout(1.0):
        for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
            while sum([await stack.metric(e, name) for e in stack.engines]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_prompts_of_one_tenant_share_a_pod_and_tenants_spread(stack: Stack) -> None:
    rng = random.Random(3)
    tenants = [f"Tenant {i} has a handbook of its own. " * 60 for i in range(9)]
    pods: dict[int, set[str]] = {}
    for _ in range(4):
        for i, tenant in enumerate(tenants):
            _, pod = await stack.ask(f"{tenant} Question {rng.random()}")
            pods.setdefault(i, set()).add(pod)
    # At random, one tenant in 27 would stay on its pod. If a busy machine delays a pod, tenants rightly leave it.
    assert sum(len(seen) == 1 for seen in pods.values()) >= 6, f"an idle fleet moves no tenant: {pods}"
    assert len(set().union(*pods.values())) == PODS, f"an idle fleet uses all its pods: {pods}"


async def test_gateways_agree_on_traffic_shares(stack: Stack) -> None:
    async with gateway_before(stack.redis, stack.engines, policy="affinity_groups") as second:
        prompt = "What everybody asks about. " * 40
        key = prefix_keys(prompt.encode(), key_seed("tiny"))[0]
        await second.ask(prompt)
        async with gateway_before(stack.redis, stack.engines, policy="affinity_groups") as third:
            await third.ask("something else entirely, and too short to have a key")
            now_s = asyncio.get_running_loop().time
            await wait_until(lambda: third.app[CHOOSER].traffic_shares()["tiny"].share(key, now_s()) > 0.5)
            partitioned = [gateway.app[CHOOSER].shares()["tiny"].prefill for gateway in (second, third)]
            await wait_until(lambda: all(each.partition(now_s()) is not None for each in partitioned))


async def test_an_engine_killed_under_traffic_costs_no_unstarted_request(tiny_checkpoint: Path) -> None:
    flags = ["--model", str(tiny_checkpoint), "--served-model-name", "tiny", "--device", "sim", "--port", "0"]
    with running_redis() as server:
        engines = [Program("engine", *flags, "--redis-url", server.url) for _ in range(3)]
        with running(engines):
            async with gateway_before(server, engines) as stack:
                rng = random.Random(4)
                statuses: list[int] = []

                async def traffic() -> None:
                    for _ in range(25):
                        status, _ = await stack.ask(prompts(rng, 1)[0], max_tokens=4)
                        statuses.append(status)

                async with asyncio.TaskGroup() as group:
                    for _ in range(6):
                        group.create_task(traffic())
                    await asyncio.sleep(0.4)
                    engines[0].process.send_signal(signal.SIGKILL)
                # An answer that had begun on the dead pod ends in an error event (599); nothing else fails.
                assert set(statuses) <= {200, 599}
                assert statuses.count(599) <= 6
                assert statuses.count(200) >= 140
                status, _pod = await stack.ask("after the funeral")
                assert status == 200
                async with asyncio.timeout(30):  # the next probes find the dead pod if no request did
                    while sum(pod["admitted"] for pod in await pods_of(stack)) != 2:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)


async def pods_of(stack: Stack) -> list[dict[str, Any]]:
    async with stack.http.get(f"{stack.admin}/v1/pods") as answer:
        pods: list[dict[str, Any]] = (await answer.json())["pods"]
        return pods


async def test_several_models_have_pods_of_their_own(tiny_checkpoint: Path) -> None:
    def engine(server: RedisServer, model: str) -> Program:
        flags = ["--model", str(tiny_checkpoint), "--device", "sim", "--port", "0", "--redis-url", server.url]
        return Program("engine", *flags, "--served-model-name", model)

    with running_redis() as server:
        engines = [engine(server, "small"), engine(server, "large"), engine(server, "large")]
        with running(engines):
            async with gateway_before(server, engines) as stack:
                async with stack.http.get(f"{stack.gateway}/v1/models") as answer:
                    assert {model["id"] for model in (await answer.json())["data"]} == {"small", "large"}
                prompt = "The same prompt for both models. " * 20
                small = {(await stack.ask(f"{prompt}{i}", model="small"))[1] for i in range(4)}
                large = {(await stack.ask(f"{prompt}{i}", model="large"))[1] for i in range(4)}
                assert len(small) == 1
                assert not small & large
                assert (await stack.ask("x", model="absent"))[0] == 404
                await wait_index_equal(stack)


async def test_a_restarted_engine_is_cold_and_known_to_be(tiny_checkpoint: Path) -> None:
    with running_redis() as server:
        flags = ["--model", str(tiny_checkpoint), "--served-model-name", "tiny", "--device", "sim"]
        first = Program("engine", *flags, "--port", "0", "--pod-id", "pod-a", "--redis-url", server.url)
        with running([first]) as [url]:
            async with gateway_before(server, [first]) as stack:
                prompt = "Something to remember. " * 40
                await stack.ask(prompt)
                await wait_until(lambda: bool(stack.app[INDEX].held(PodId("pod-a"))))
                first.stop()
                port = url.rpartition(":")[2]
                second = Program("engine", *flags, "--port", port, "--pod-id", "pod-a", "--redis-url", server.url)
                with running([second]):
                    stack.engines = [second]
                    async with asyncio.timeout(15):
                        while (await stack.ask("hello there"))[0] != 200:  # noqa: ASYNC110
                            await asyncio.sleep(0.1)
                    truth = await wait_index_equal(stack)
                    assert truth == {"pod-a": set()}, "the restarted engine holds no prefix as long as a stride"
