"""The measured engine: its CUDA backend, started as by the server, and its step loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from engine.backend.cuda.backend import CudaBackend
from engine.backend.cuda.device import CudaDevice, Device
from engine.backend.cuda.memory import DeviceMemory
from engine.backend.cuda.start import Starter
from engine.cache.prefix_cache import PrefixCache
from engine.loop.step_loop import EngineLoop
from engine.sched.request import Request
from engine.sched.sampling import SamplingParams
from engine.sched.scheduler import Scheduler, SchedulerConfig
from tests.bench.gpu.models import Model

GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The settings that the start of the backend reads, with the names of `engine.startup.settings.EngineSettings`."""

    block_size: int
    max_step_tokens: int
    max_running: int
    max_model_len: int
    kv_pool_tokens: int = 0
    kv_cache_bytes: int = 0
    kv_memory_share: float = 0.95
    cuda_graphs: bool = True
    attention: str = "triton"
    model: Path = Path("dummy weights")
    dtype: str = "auto"
    device: str = ""


def start_backend(model: Model, shape: EngineShape) -> tuple[CudaBackend, int]:
    """Return the backend with made weights, and the number of blocks of its pool, which hold small random numbers."""
    device: Device
    if model.device.type == "cuda":
        device, capability = CudaDevice(model.device), torch.cuda.get_device_capability(model.device)
    else:
        from tests.engine.cuda.devices import CpuDevice

        device, capability = CpuDevice(), (0, 0)
    memory = DeviceMemory(str(model.device), device.total_bytes(), device.free_bytes())
    settings: Any = shape
    decoder = model.decoder()
    _synchronize(model.device)
    backend, blocks = Starter(settings, model.config, device, memory).finish(decoder, capability)
    with torch.inference_mode(False), torch.no_grad():
        backend.pool.data.normal_(0.0, 0.5)
    _synchronize(model.device)
    return backend, blocks


def _synchronize(device: torch.device) -> None:
    """Wait for work on the default stream, because the backend has its own stream."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class NoMetrics:
    """Replaces `engine.loop.metrics.EngineMetrics`: nothing is exported here."""

    class _Ignore:
        def observe(self, value: float) -> None: ...

        def inc(self) -> None: ...

    def __init__(self) -> None:
        self.requests = SimpleNamespace(queue=self._Ignore())
        self.steps = SimpleNamespace(failures=self._Ignore())

    def observe_step(self, **figures: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's outcome."""

    tokens: list[int]
    first_token_s: float
    """Seconds from the submission."""
    cached_tokens: int


class Engine:
    """Scheduler, prefix cache and step loop over a backend, as in the server, but without HTTP and tokenizer."""

    def __init__(self, backend: CudaBackend, blocks: int, shape: EngineShape) -> None:
        self._cache = PrefixCache(blocks, shape.block_size)
        limits = SchedulerConfig(
            max_step_tokens=shape.max_step_tokens, max_running=shape.max_running, max_waiting=1 << 20
        )
        metrics: Any = NoMetrics()
        self._scheduler = Scheduler(self._cache, limits)
        self.loop = EngineLoop(
            self._scheduler, backend, on_changes=lambda _: None, metrics=metrics, step_deadline_s=300.0
        )
        self._next_id = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Engine]:
        """Run the engine's steps within the context."""
        stepping = asyncio.create_task(self.loop.run())
        try:
            yield self
        finally:
            stepping.cancel()
            await asyncio.wait([stepping])

    def forget(self) -> None:
        """Drop all cached prefixes."""
        self.loop.reset_cache()

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Return one greedy answer of exactly `max_tokens`."""
        self._next_id += 1
        request = Request(self._next_id, list(prompt), max_tokens, GREEDY)
        tokens: list[int] = []
        start_s, first_s, cached = time.perf_counter(), 0.0, 0
        async with self.loop.submit([request]) as stream:
            async for output in stream:
                if output.token is not None:
                    first_s = first_s or time.perf_counter() - start_s
                    tokens.append(output.token.token)
                cached = output.cached_tokens
        return Answer(tokens, first_s, cached)

    async def ask_all(self, prompts: Sequence[tuple[Sequence[int], int]]) -> tuple[list[Answer], float]:
        """Send all prompts at once; return their answers in order, and the seconds until the last has ended."""
        start_s = time.perf_counter()
        answers = await asyncio.gather(*(self.ask(prompt, count) for prompt, count in prompts))
        return answers, time.perf_counter() - start_s
