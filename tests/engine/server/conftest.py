"""Engines on a real socket: the whole program except its command line, with a fast emulated device."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.backend.base import Backend
from engine.backend.profiles import SimProfile
from engine.backend.sim import SimBackend
from engine.loop.metrics import EngineMetrics
from engine.model.checkpoint import make_checkpoint
from engine.server.service import EngineService, ServerState
from engine.startup.app import Ports, listening, load
from engine.startup.constants import Constants
from engine.startup.loaded import LoadedModel
from engine.startup.settings import EngineSettings
from engine.startup.tasks import engine_tasks

FAST = SimProfile("fast", w0_ms=0.2, a_ms=0, c1_ms=0, c2_ms=0, c3_ms=0, c4_ms=0, kv_tokens=16_384)
SLOW = replace(FAST, name="slow", w0_ms=20)
MODEL = "tiny"


@dataclass(frozen=True)
class Engine:
    """A running engine and a client session for it."""

    url: str
    http: aiohttp.ClientSession
    state: ServerState
    ports: Ports

    @property
    def service(self) -> EngineService:
        assert self.state.service is not None
        return self.state.service

    def held_blocks(self) -> int:
        load = self.service.scheduler.load()
        return load.blocks_total - load.blocks_free

    def post(self, path: str, **fields: Any) -> Any:
        return self.http.post(self.url + path, json=fields)

    async def ask(self, path: str, **fields: Any) -> tuple[int, Any]:
        async with self.post(path, **fields) as response:
            return response.status, await response.json()

    async def text(self, path: str) -> str:
        async with self.http.get(self.url + path) as response:
            return await response.text()


Start = Callable[..., AbstractAsyncContextManager[Engine]]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / MODEL
    make_checkpoint(folder, hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate_size=32, max_position=4096)
    return folder


@pytest.fixture(scope="session")
def loaded(checkpoint: Path) -> LoadedModel:
    return load(EngineSettings(model=checkpoint, device="sim"))


@pytest.fixture
def start(checkpoint: Path, loaded: LoadedModel) -> Start:
    """Start an engine: `async with start(profile=..., backend=..., max_waiting=...) as engine`."""

    @asynccontextmanager
    async def started(
        profile: SimProfile = FAST, backend: Backend | None = None, **fields: Any
    ) -> AsyncIterator[Engine]:
        constants = Constants(**{name: fields.pop(name) for name in Constants.__dataclass_fields__ if name in fields})
        settings = EngineSettings(model=checkpoint, device="sim", port=0, pod_id="pod-1", **fields)
        vocab_size = loaded.text.tokenizer.vocab_size
        device = backend or SimBackend(profile, vocab_size, token_bytes=loaded.text.tokenizer.token_bytes)
        model = replace(loaded, backend=device, blocks=profile.kv_tokens // 16)
        state, metrics = ServerState(), EngineMetrics(settings.model_name)
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http,
            listening(settings, state, metrics) as ports,
            engine_tasks(settings, state, metrics, model, ports.clients, constants=constants),
        ):
            yield Engine(f"http://127.0.0.1:{ports.clients}", http, state, ports)

    return started


@pytest.fixture
async def engine(start: Start) -> AsyncIterator[Engine]:
    async with start() as engine:
        yield engine


async def wait_until(condition: Callable[[], bool], deadline_s: float = 30) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
