"""A tiny real checkpoint for the programs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from engine.contract.redis_keys import LEARNT_KEY
from engine.model.checkpoint import make_checkpoint
from tests.e2e.programs import Program, running
from tests.e2e.stack import PODS, Stack, gateway_before
from tests.redis_server import RedisServer, running_redis


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a real Llama checkpoint with two layers of hidden size 64, which answers in milliseconds."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(folder, hidden_size=64, layers=2, heads=4, kv_heads=2, intermediate_size=128, max_position=4096)
    return folder


@pytest.fixture(scope="session")
def sim_engines(tiny_checkpoint: Path) -> Iterator[tuple[RedisServer, list[Program]]]:
    """Run three engines with emulated devices and small pools, so that blocks are evicted.

    All tests share the engines, because each costs two seconds of a core to start. A test leaves them as it found them,
    except for their caches.
    """
    flags = ["--model", str(tiny_checkpoint), "--served-model-name", "tiny", "--device", "sim", "--port", "0"]
    with running_redis() as server:
        engines = [
            Program("engine", *flags, "--kv-pool-tokens", "4096", "--redis-url", server.url) for _ in range(PODS)
        ]
        with running(engines):
            yield server, engines


@pytest.fixture
async def stack(sim_engines: tuple[RedisServer, list[Program]]) -> AsyncIterator[Stack]:
    server, engines = sim_engines
    # Otherwise the gateway starts with what the previous one learnt about the model, here from another test's texts.
    with redis.Redis.from_url(server.url) as client:
        client.delete(LEARNT_KEY)
    async with gateway_before(server, engines) as stack:
        yield stack
