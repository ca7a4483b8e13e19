"""The engine on the CPU with a host tier: real KV, real threads, a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.contract.events import Tier
from engine.contract.load import StepCost
from engine.loop.metrics import EngineMetrics
from engine.model.checkpoint import make_checkpoint
from engine.sched.plan import StepPlan
from engine.sched.scheduler import Scheduler
from engine.server.service import ServerState
from engine.startup.app import listening, load
from engine.startup.settings import EngineSettings
from engine.startup.tasks import engine_tasks
from engine.tiers.stores.block_file import HEAD_BYTES, LABEL_BYTES
from engine.tiers.stores.store import TierError
from tests.conftest import wait_until

POOL_TOKENS, BLOCK = 512, 16
PROMPT_TOKENS = 300


class SlowDevice:
    """Claims that computing takes seconds, so all kept blocks are fetched, however busy the machine is."""

    least_s = 0.0

    def observe(self, plan: StepPlan, elapsed_s: float, steps: int = 1) -> None:
        """Learn nothing."""

    def cost(self) -> StepCost:
        return StepCost(token_s=1.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    make_checkpoint(folder, hidden_size=32, layers=2, heads=2, kv_heads=1, intermediate_size=32, max_position=512)
    return folder


class Engine:
    """A running engine on the CPU."""

    def __init__(self, url: str, http: aiohttp.ClientSession, state: ServerState, metrics: EngineMetrics) -> None:
        self.url, self.http, self.state, self.metrics = url, http, state, metrics

    @property
    def scheduler(self) -> Scheduler:
        assert self.state.service is not None
        return self.state.service.scheduler

    async def answer(self, first: int, **fields: Any) -> tuple[Any, int]:
        """Return the answer to the prompt that begins with `first`, and its cached tokens. The answer has
        log-probabilities, so that a wrong bit shows."""
        asked = {"prompt": [first, *range(4, 3 + PROMPT_TOKENS)], "max_tokens": 4, "temperature": 0, "logprobs": 3}
        async with self.http.post(f"{self.url}/v1/completions", json={**asked, **fields}) as response:
            body = await response.json()
            assert response.status == 200, body
            return body["choices"], body["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def settled(self) -> None:
        """Wait until all copies have ended."""
        tiers: Any = self.scheduler._tiers
        assert tiers is not None
        await wait_until(lambda: not tiers.is_busy, what="the end of all copies")

    def metric(self, name: str, **labels: str) -> float:
        labels = {"model_name": self.state.serving().model.name, **labels}
        self.metrics.exposition()
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def engine(checkpoint: Path, *, learns: bool = True, **fields: Any) -> AsyncIterator[Engine]:
    settings = EngineSettings(model=checkpoint, port=0, kv_pool_tokens=POOL_TOKENS, threads=1, pod_id="pod", **fields)
    state, metrics = ServerState(), EngineMetrics(settings.model_name)
    loaded = await asyncio.to_thread(load, settings)
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http,
        listening(settings, state, metrics) as ports,
        engine_tasks(settings, state, metrics, loaded, ports.clients),
    ):
        made = Engine(f"http://127.0.0.1:{ports.clients}", http, state, metrics)
        made.scheduler._step_cost = SlowDevice()  # type: ignore[assignment]
        if learns and (tiers := made.scheduler._tiers) is not None:
            tiers.learn_cost(SlowDevice().cost())
        yield made


async def test_what_left_the_pool_comes_back_bit_for_bit(checkpoint: Path) -> None:
    async with engine(checkpoint, host_cache_bytes=2**24) as pod:
        cold = {}
        for first in (1, 2, 3):  # two of them do not fit the pool together
            cold[first], cached = await pod.answer(first)
            assert cached == 0
            await pod.settled()
        for first in (1, 2, 3, 1):
            warm, cached = await pod.answer(first)
            await pod.settled()
            assert cached == (PROMPT_TOKENS - 1) // BLOCK * BLOCK
            assert warm == cold[first]
        hit = pod.metric("warmroute_tier_hit_tokens_total", tier="host")
        asked = pod.metric("warmroute_tier_query_tokens_total", tier="host")
        assert 3 * PROMPT_TOKENS + 3 * 18 * BLOCK <= 3 * PROMPT_TOKENS + hit <= asked <= 7 * PROMPT_TOKENS
        assert pod.metric("warmroute_tier_fetches_total", outcome="arrived") >= 3
        assert pod.metric("warmroute_tier_bytes", tier="host") > 0


async def test_tenants_share_nothing_in_the_host_tier(checkpoint: Path) -> None:
    async with engine(checkpoint, host_cache_bytes=2**24) as pod:
        for first in (1, 2, 3):
            await pod.answer(first, cache_salt="red")
            await pod.settled()
        _, cached = await pod.answer(1, cache_salt="blue")
        assert cached == 0
        _, cached = await pod.answer(1)
        assert cached == 0
        await pod.settled()
        _, cached = await pod.answer(1, cache_salt="red")
        assert cached > 0


async def test_a_reset_empties_the_host_tier(checkpoint: Path) -> None:
    async with engine(checkpoint, host_cache_bytes=2**24) as pod:
        for first in (1, 2, 3):
            await pod.answer(first)
            await pod.settled()
        assert pod.state.service is not None
        pod.state.service.loop.reset_cache()
        _, cached = await pod.answer(1)
        assert cached == 0


def test_a_tier_too_small_for_a_block_is_refused(checkpoint: Path) -> None:
    with pytest.raises(TierError, match="--host-cache-bytes 100 holds no block: one block takes"):
        load(EngineSettings(model=checkpoint, kv_pool_tokens=POOL_TOKENS, threads=1, host_cache_bytes=100))


def test_a_tier_without_an_index_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="--host-cache-bytes needs --prefix-cache hash or radix"):
        EngineSettings(model=checkpoint, prefix_cache="off", host_cache_bytes=100)


async def test_the_disk_is_found_again_after_a_restart(checkpoint: Path, tmp_path: Path) -> None:
    """Only the same model finds its blocks. Blocks damaged meanwhile are computed again, with the same answer."""
    fields: dict[str, Any] = {"host_cache_bytes": 2**24, "disk_cache_bytes": 2**24, "disk_cache_path": tmp_path / "kv"}
    cold = {}
    async with engine(checkpoint, **fields) as pod:
        for first in (1, 2):
            cold[first], cached = await pod.answer(first, cache_salt="red")
            assert cached == 0
            await pod.settled()
        assert pod.metric("warmroute_tier_demotions_total", tier="disk") == 2 * 18
    async with engine(checkpoint, learns=False, **fields) as pod:  # the earlier engine stored what it had learnt
        await wait_until(lambda: len(pod.scheduler.held_keys()[Tier.DISK]) > 0, what="the keys on disk")
        warm, cached = await pod.answer(1, cache_salt="red")
        assert (warm, cached) == (cold[1], 18 * BLOCK)
        assert pod.metric("warmroute_tier_hit_tokens_total", tier="disk") == 18 * BLOCK
        _, cached = await pod.answer(1, cache_salt="blue")
        assert cached == 0
        await pod.settled()
    file = next((tmp_path / "kv").glob("*.warmroute-kv"))
    content = bytearray(file.read_bytes())
    for at in range(HEAD_BYTES + LABEL_BYTES, len(content), 4096):
        content[at + 7] ^= 4  # in each block, or in its label
    file.write_bytes(content)
    (tmp_path / "kv" / "other.warmroute-kv").write_bytes(b"of another model")
    async with engine(checkpoint, **fields) as pod:
        assert pod.metric("warmroute_tier_discarded_files_total", tier="disk") == 1
        for first in (1, 2):
            again, cached = await pod.answer(first, cache_salt="red")
            assert (again, cached) == (cold[first], 0)
            await pod.settled()


async def test_no_later_engine_finds_what_a_reset_has_removed_from_the_disk(checkpoint: Path, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"host_cache_bytes": 2**24, "disk_cache_bytes": 2**24, "disk_cache_path": tmp_path / "kv"}
    async with engine(checkpoint, **fields) as pod:
        for first in (1, 2):
            await pod.answer(first)
            await pod.settled()
        assert pod.state.service is not None
        pod.state.service.loop.reset_cache()
        await pod.answer(3)
        await pod.settled()
    async with engine(checkpoint, learns=False, **fields) as pod:
        await wait_until(lambda: len(pod.scheduler.held_keys()[Tier.DISK]) > 0, what="the keys on disk")
        for first, cached in ((3, 18 * BLOCK), (1, 0), (2, 0)):
            assert (await pod.answer(first))[1] == cached, "only what came after the reset is there"
            await pod.settled()


def test_a_disk_tier_needs_a_place_and_a_host_tier(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--disk-cache-bytes needs --host-cache-bytes"):
        EngineSettings(model=checkpoint, disk_cache_bytes=2**20, disk_cache_path=tmp_path)
    with pytest.raises(ValueError, match="--disk-cache-bytes and --disk-cache-path need each other"):
        EngineSettings(model=checkpoint, host_cache_bytes=2**20, disk_cache_bytes=2**20)
    fields: dict[str, Any] = {
        "model": checkpoint,
        "kv_pool_tokens": POOL_TOKENS,
        "threads": 1,
        "host_cache_bytes": 2**20,
    }
    with pytest.raises(TierError, match="--disk-cache-bytes 5000 holds no block"):
        load(EngineSettings(**fields, disk_cache_bytes=5000, disk_cache_path=tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(TierError, match="file cannot be used: File exists"):
        load(EngineSettings(**fields, disk_cache_bytes=2**20, disk_cache_path=tmp_path / "file"))
