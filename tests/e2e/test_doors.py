"""A gateway empties the caches of engines that require a key and have a port for operators."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.programs import Program, running
from tests.e2e.stack import gateway_before
from tests.redis_server import running_redis


async def test_a_reset_passes_a_gateway_and_shows_its_key(tiny_checkpoint: Path, tmp_path: Path) -> None:
    keys, shown = tmp_path / "keys", tmp_path / "shown"
    keys.write_text("of-another\nof-gateways\n")
    shown.write_text("of-gateways\n")
    flags = ("--model", str(tiny_checkpoint), "--served-model-name", "tiny", "--device", "sim", "--port", "0")
    doors = ("--api-key-file", str(keys), "--admin-port", "0", "--metrics-port", "0")
    with running_redis() as server:
        engine = Program("engine", *flags, *doors, "--redis-url", server.url)
        with running([engine]):
            assert [line.split()[0] for line in engine.output().splitlines() if " on http://" in line] == [
                *("listening", "metrics", "administration")
            ]
            async with gateway_before(server, [engine], engine_api_key_file=str(shown)) as stack:
                assert (await stack.ask("A prompt that fills some blocks. " * 20))[0] == 200
                async with stack.http.post(f"{stack.admin}/reset_prefix_cache") as answer:
                    assert (answer.status, set((await answer.json())["pods"].values())) == (200, {"ok"})
                async with stack.http.post(f"{engine.url}/reset_prefix_cache") as answer:
                    assert answer.status == 401
            assert '"action":"POST /reset_prefix_cache"' in engine.output()
