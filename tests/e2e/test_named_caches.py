"""Named caches with real engines: stored content is warm for its owner, survives a pod, and stays private."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from engine.contract import headers
from router.startup.parts import FLEET
from tests.e2e.programs import Program, running
from tests.e2e.stack import Stack, gateway_before, wait_index_equal
from tests.redis_server import RedisServer, running_redis
from tests.router.rig.helpers import eventually

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
BOOK = "The handbook says that a pod restarts when its probe fails, and that nobody is woken for it. " * 20
STORED = {"model": "tiny", "system": "Be brief.", "messages": [{"role": "user", "content": BOOK}], "ttl": "600s"}


@pytest.fixture(scope="module")
def fleet(tiny_checkpoint: Path) -> Iterator[tuple[RedisServer, list[Program]]]:
    """Run two engines that compute on the CPU."""
    flags = ["--model", str(tiny_checkpoint), "--served-model-name", "tiny", "--device", "cpu", "--threads", "1"]
    with running_redis() as redis:
        engines = [Program("engine", *flags, "--port", "0", "--redis-url", redis.url) for _ in range(2)]
        with running(engines):
            yield redis, engines


async def call(stack: Stack, method: str, path: str, body: Any = None, key: str = "") -> tuple[int, Any, str]:
    """Return status, answer, and pod."""
    sent = {"Authorization": f"Bearer {key}"} if key else {}
    async with stack.http.request(method, stack.gateway + path, json=body, headers=sent) as answer:
        return answer.status, await answer.json(), answer.headers.get(headers.POD, "")


async def ask(stack: Stack, name: str, question: str, path: str = CHAT, key: str = "") -> tuple[int, int, str]:
    """Return prompt tokens, reused tokens according to the engine, and the pod."""
    body = {"messages": [{"role": "user", "content": question}], "cached_content": name, "max_tokens": 4}
    status, said, pod = await call(stack, "POST", path, body, key)
    assert status == 200, said
    usage = said["usage"]
    if path == CHAT:
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], pod
    read = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + usage["cache_creation_input_tokens"] + read, read, pod


def tenants(folder: Path) -> dict[str, str]:
    entries = [
        f"  - {{name: {name}, isolation: tenant, keys: [{{sha256: '{sha256(f'key-{name}'.encode()).hexdigest()}'}}]}}"
        for name in "ab"
    ]
    (folder / "tenants").write_text("\n".join(["tenants:", *entries]))
    (folder / "secret").write_text("0" * 64)
    return {"tenants_file": str(folder / "tenants"), "tenant_secret_file": str(folder / "secret")}


async def test_two_gateways_tenants_and_a_restart_of_redis(
    fleet: tuple[RedisServer, list[Program]], tmp_path: Path
) -> None:
    """Each gateway expands caches that the other stored, but only for the same tenant. Redis may be down."""
    redis, engines = fleet
    given = tenants(tmp_path)
    async with gateway_before(redis, engines, **given) as one, gateway_before(redis, engines, **given) as two:
        _, made, _ = await call(one, "POST", "/v1/caches", STORED, "key-a")
        name = made["name"]
        prompt, cold, first = await ask(one, name, "Why?", key="key-a")
        assert cold == 0
        for stack, path in ((two, CHAT), (one, MESSAGES), (two, MESSAGES)):
            await wait_index_equal(stack)  # a gateway learns one published batch later what the other made warm
            again, warm, pod = await ask(stack, name, "And now?", path, key="key-a")
            assert (pod, warm > 0.8 * prompt, abs(again - prompt) < 10) == (first, True, True)
        theirs = {"messages": [{"role": "user", "content": "x"}], "cached_content": name}
        for path, code in ((CHAT, ("error", "code")), (MESSAGES, ("error", "details", "error_code"))):
            status, said, _ = await call(two, "POST", path, {**theirs, "max_tokens": 4}, "key-b")
            for step in code:
                said = said[step]
            assert (status, said) == (404, "cache_not_found")
        _, own, _ = await call(two, "POST", "/v1/caches", STORED, "key-b")
        assert (await ask(two, own["name"], "Why?", key="key-b"))[1] == 0, "equal contents, but different salts"
        redis.stop()
        assert (await ask(one, name, "Still?", key="key-a"))[1] > 0, "this gateway knows the cache"
        status, said, _ = await call(one, "POST", CHAT, {**theirs, "cached_content": own["name"]}, "key-b")
        assert (status, said["error"]["code"]) == (503, "caches_unavailable"), (
            "this gateway does not know the other gateway's cache"
        )
        redis.start()
        status, _, _ = await call(one, "PATCH", "/v1/" + own["name"], {"ttl": "5s"}, "key-b")
        assert status == 404, "this Redis loses everything at its restart"


async def test_the_pod_dies_and_another_one_makes_it_anew(fleet: tuple[RedisServer, list[Program]]) -> None:
    redis, engines = fleet
    async with gateway_before(redis, engines) as stack:
        pods = {str(pod.pod_id): pod.url for pod in stack.app[FLEET].answering()}
        _, made, _ = await call(stack, "POST", "/v1/caches", {**STORED, "displayName": "of a pod that dies"})
        name = made["name"]
        prompt, _, first = await ask(stack, name, "Why?")
        _, reused, pod = await ask(stack, name, "Again?")
        assert reused == pytest.approx(prompt, rel=0.2)
        assert pod == first
        status, renewed, _ = await call(stack, "PATCH", "/v1/" + name, {"ttl": "1200s"})
        assert (status, renewed["expireTime"] > made["expireTime"]) == (200, True)
        victim = next(engine for engine in engines if engine.url == pods[first])
        victim.process.kill()
        again, cold, other = await ask(stack, name, "And now?")
        assert (other != first, cold, abs(again - prompt) < 10) == (True, 0, True)
        _, reused, pod = await ask(stack, name, "Warm?")
        assert reused == pytest.approx(prompt, rel=0.2), "the other pod computed it again"
        assert pod == other
        assert (await call(stack, "DELETE", "/v1/" + name))[0] == 200
        body = {"messages": [{"role": "user", "content": "Gone?"}], "cached_content": name, "max_tokens": 4}
        assert (await call(stack, "POST", CHAT, body))[0] == 404
        _, short, _ = await call(stack, "POST", "/v1/caches", {**STORED, "ttl": "0.3s"})
        await eventually(lambda: len(stack.app[FLEET].answering()) == 1)
        await asyncio.sleep(0.4)
        assert (await call(stack, "GET", "/v1/" + short["name"]))[0] == 404
        assert (await call(stack, "POST", CHAT, {**body, "cached_content": short["name"]}))[0] == 404
