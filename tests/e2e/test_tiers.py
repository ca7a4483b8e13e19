"""A real engine with tiers and a gateway: tenants share nothing in any tier, and the gateway sees the tiers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.e2e.stack import Stack, gateway_before
from tests.engine.tiers.test_host_tier import Engine, engine
from tests.redis_server import RedisServer, running_redis

PROMPT = "All tenants begin their requests with these very words, as a shared template has it. " * 12
OTHER = "Nobody has asked this before, and nobody is going to ask it again either, so it only takes room. " * 12
TENANTS = ("a", "b", "c", "d")


@asynccontextmanager
async def started(
    server: RedisServer, checkpoint: Path, folder: Path, **settings: object
) -> AsyncIterator[tuple[Engine, Stack]]:
    """Run an engine whose pool holds a prompt and a half, with its disk tier in `folder`, and a gateway for it."""
    fields: dict[str, Any] = {
        "host_cache_bytes": 2**23,
        "disk_cache_bytes": 2**23,
        "disk_cache_path": folder,
        "redis_url": server.url,
    }
    async with engine(checkpoint, **fields) as pod, gateway_before(server, [pod], **settings) as stack:  # type: ignore[list-item]
        yield pod, stack


async def reused(pod: Engine, stack: Stack, prompt: str, tenant: str = "") -> int:
    """Return the reused prompt tokens, once the request's blocks have been copied to the tiers."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
    sent = {"Authorization": f"Bearer key-{tenant}"} if tenant else {}
    async with stack.http.post(f"{stack.gateway}/v1/completions", json=body, headers=sent) as answer:
        assert answer.status == 200, await answer.text()
        cached = (await answer.json())["usage"]["prompt_tokens_details"]["cached_tokens"]
    await pod.settled()
    return int(cached)


async def eventually_sees(stack: Stack, condition: Callable[[int, int, int], bool]) -> None:
    """Wait until `condition` holds for the prompt tokens that the gateway believes cached: in any tier, in host memory,
    and on disk."""
    seen = (0, 0, 0)
    body = {"model": "tiny", "prompt": PROMPT}
    for _ in range(400):
        async with stack.http.post(f"{stack.admin}/v1/route/explain", json=body) as answer:
            assert answer.status == 200, await answer.text()
            (pod,) = (await answer.json())["pods"]
        seen = tuple(pod["view"][name] for name in ("matched_tokens", "host_tokens", "disk_tokens"))
        if condition(*seen):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"the gateway sees {seen}")


async def test_tenants_share_nothing_in_any_tier_nor_after_a_restart(tiny_checkpoint: Path, tmp_path: Path) -> None:
    entries = [
        f"  - {{name: {name}, isolation: tenant, keys: [{{sha256: '{sha256(f'key-{name}'.encode()).hexdigest()}'}}]}}"
        for name in TENANTS
    ]
    (tmp_path / "tenants").write_text("\n".join(["tenants:", *entries]))
    (tmp_path / "secret").write_text("0" * 64)
    files = {"tenants_file": str(tmp_path / "tenants"), "tenant_secret_file": str(tmp_path / "secret")}
    hits = "warmroute_tier_hit_tokens_total"
    with running_redis() as server:
        async with started(server, tiny_checkpoint, tmp_path / "kv", **files) as (pod, stack):
            assert await reused(pod, stack, PROMPT, "a") == 0
            assert await reused(pod, stack, PROMPT, "b") == 0, "a's tokens are in the pool"
            assert pod.metric(hits, tier="host") == 0
            assert await reused(pod, stack, PROMPT, "a") > 200
            assert pod.metric(hits, tier="host") > 0, "b's tokens had pushed a's out of the pool"
            assert await reused(pod, stack, PROMPT, "c") == 0, (
                "others' tokens are in the pool, in host memory and on disk"
            )
        async with started(server, tiny_checkpoint, tmp_path / "kv", **files) as (pod, stack):
            assert await reused(pod, stack, PROMPT, "d") == 0, "others' tokens are on disk after a restart"
            for tenant in ("a", "b", "c"):
                assert await reused(pod, stack, PROMPT, tenant) > 200, "each tenant reuses its own tokens"
            assert pod.metric(hits, tier="disk") > 3 * 200


async def test_a_gateway_sees_in_which_tier_a_prefix_is(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A prefix is in host memory after its eviction from the pool, and on disk after a restart. Registry and explain
    show that."""
    with running_redis() as server:
        async with started(server, tiny_checkpoint, tmp_path / "kv") as (pod, stack):
            await reused(pod, stack, PROMPT)
            await eventually_sees(stack, lambda held, host, disk: held > 200 and host == disk == 0)
            await reused(pod, stack, OTHER)
            await eventually_sees(stack, lambda held, host, disk: held > 200 and host > 0 and disk == 0)
        async with started(server, tiny_checkpoint, tmp_path / "kv") as (pod, stack):
            await eventually_sees(stack, lambda held, host, disk: held == disk > 200 and host == 0)
