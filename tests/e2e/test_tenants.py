"""Two tenants send equal prompts to real engines, but no token of one tenant's cache is reused for the other."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

from engine.contract import headers
from tests.e2e.programs import Program
from tests.e2e.stack import Stack, empty_caches, gateway_before, wait_index_equal
from tests.redis_server import RedisServer

PROMPT = "All tenants begin their requests with these very words, as a shared template has it. " * 20


async def ask(stack: Stack, tenant: str, **more: Any) -> tuple[int, int]:
    """Return the prompt tokens that the gateway believed cached, and those that the engine reused."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2, **more}
    sent = {"Authorization": f"Bearer key-{tenant}"}
    async with stack.http.post(f"{stack.gateway}/v1/completions", json=body, headers=sent) as answer:
        assert answer.status == 200, await answer.text()
        said = await answer.json()
        return int(answer.headers[headers.PREDICTED_CACHED]), said["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_tenants_reuse_their_own_cache_and_no_others(
    sim_engines: tuple[RedisServer, list[Program]], tmp_path: Path
) -> None:
    entries = [
        f"  - {{name: {name}, isolation: {kind}, keys: [{{sha256: '{sha256(f'key-{name}'.encode()).hexdigest()}'}}]}}"
        for name, kind in (("a", "tenant"), ("b", "tenant"), ("c", "none"))
    ]
    (tmp_path / "tenants").write_text("\n".join(["tenants:", *entries]))
    (tmp_path / "secret").write_text("0" * 64)
    files = {"tenants_file": str(tmp_path / "tenants"), "tenant_secret_file": str(tmp_path / "secret")}
    server, engines = sim_engines
    await empty_caches(engines[:1])
    async with gateway_before(server, engines[:1], **files) as stack:
        for tenant in ("a", "b", "c"):
            assert await ask(stack, tenant) == (0, 0), f"{tenant} is the first to send these words, in its own cache"
            await wait_index_equal(stack)
            believed, reused = await ask(stack, tenant)
            assert believed > 200
            assert reused > 200
        assert await ask(stack, "a", cache_salt="x") == (0, 0)
        assert (await ask(stack, "a"))[1] > 200, "the other tenant's requests evicted nothing"
