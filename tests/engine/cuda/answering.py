"""Runs the engine loop over a backend, and collects its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from engine.backend.base import Backend
from engine.backend.cuda.attention import TritonAttention
from engine.backend.cuda.backend import CudaBackend, Forward
from engine.backend.cuda.decoder import CudaDecoder
from engine.backend.cuda.device import Device
from engine.backend.cuda.kernels.prefill import tiling_for
from engine.backend.torch_kv import KvPool
from engine.cache.prefix_cache import PrefixCache
from engine.grammar.fills import MaskFills
from engine.loop.metrics import EngineMetrics
from engine.loop.step_loop import EngineLoop
from engine.model.decoder import Decoder
from engine.sched.request import Request
from engine.sched.sampling import SamplingParams
from engine.sched.scheduler import Scheduler, SchedulerConfig
from tests.engine.cache.integrity import check_integrity
from tests.engine.cuda.torch_forward import torch_forward
from tests.engine.model.helpers import GREEDY, tokens

BLOCKS, BLOCK_SIZE, MAX_RUNNING, STEP_TOKENS = 60, 4, 6, 32
TWO_LAYERS = {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
"""Config of a Qwen2 with two layers; the second has a window."""
DEADLINE_S = 240.0
"""Seconds for all answers of a run. The interpreter takes a few seconds on an idle machine."""
Answer = list[tuple[int, float | None]]
"""Tokens with their log-probabilities."""


def cuda_backend(model: Decoder, device: Device, *, graphs: int = 0, forward: Forward | None = None) -> CudaBackend:
    """Return a backend with the model in plain torch, or another forward pass; `graphs`: largest captured batch."""
    pool = KvPool(model.config, BLOCKS, BLOCK_SIZE, dtype=model.dtype, device=model.device)
    pool.data.fill_(torch.nan)
    tiling = tiling_for(model.config.heads, model.config.kv_heads, model.device)
    forward = forward or torch_forward(model, STEP_TOKENS)
    backend = CudaBackend(device, model, forward, pool, tiling=tiling, max_blocks=32)
    if graphs:
        backend.capture_graphs(graphs, 1 << 30)
    return backend


def with_kernels(model: Decoder) -> Forward:
    decoder = CudaDecoder(model)
    attention = TritonAttention(model.config, rows=MAX_RUNNING, tokens=128, device=model.device)
    buffers = decoder.buffers(STEP_TOKENS, MAX_RUNNING)
    return lambda step, pool: decoder.forward(step, pool, attention, buffers)


def prompts() -> list[Request]:
    """Return requests that end at different steps, with as few tokens as possible.

    Two share a prefix of several blocks, and some sample.
    """
    shared = tokens(13, 1)
    sampled = SamplingParams(temperature=0.9, top_p=0.9, seed=11)
    filtered = SamplingParams(temperature=1.2, top_k=7, seed=4, logprobs=2)
    penalised = SamplingParams(temperature=0, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2)
    return [
        Request(1, [*shared, 5], 5, GREEDY),
        Request(2, [*shared, 6, 7], 7, sampled),
        Request(3, tokens(37, 2), 4, GREEDY),
        Request(4, tokens(2, 3), 9, filtered),
        Request(5, tokens(9, 4), 6, penalised),
        Request(6, [*shared, 8], 4, GREEDY, frozenset(range(0, 97, 9))),
        Request(7, tokens(5, 6), 1, GREEDY),
    ]


async def answers(
    backend: Backend, requests: Sequence[Request], blocks: int = BLOCKS, fills: MaskFills | None = None
) -> dict[int, Answer]:
    """Return the engine loop's answers with this backend. The requests come a moment apart.

    With fewer `blocks` than the default, some requests must be preempted.
    """
    cache = PrefixCache(blocks, BLOCK_SIZE)
    config = SchedulerConfig(max_step_tokens=STEP_TOKENS, max_running=MAX_RUNNING, max_waiting=20)
    scheduler = Scheduler(cache, config)
    loop = EngineLoop(
        scheduler,
        backend,
        on_changes=lambda _: None,
        metrics=EngineMetrics("m"),
        step_deadline_s=DEADLINE_S,
        fills=fills,
    )
    found: dict[int, Answer] = {}

    async def ask(request: Request) -> None:
        async with loop.submit([request]) as stream:
            found[request.id] = [(o.token.token, o.token.logprob) async for o in stream if o.token is not None]

    stepping = asyncio.create_task(loop.run())
    try:
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            for request in requests:
                group.create_task(ask(request))
                await asyncio.sleep(0.002)
    finally:
        stepping.cancel()
        await asyncio.wait([stepping])
        await backend.close()
        if fills is not None:
            fills.close()
    check_integrity(cache)
    assert (scheduler.stats().preemptions > 0) == (blocks < BLOCKS)
    return found


def agree(found: dict[int, Answer], expected: dict[int, Answer]) -> None:
    assert {i: [token for token, _ in answer] for i, answer in found.items()} == {
        i: [token for token, _ in answer] for i, answer in expected.items()
    }
    for i, answer in expected.items():
        assert [logprob for _, logprob in found[i]] == pytest.approx([logprob for _, logprob in answer], abs=1e-4)
