"""The CUDA backend on a real card: graphs, streams, page-locked copies, memory. Run by `make gpu-test`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.backend.cuda.backend import CudaBackend
from engine.backend.cuda.device import CudaDevice
from engine.backend.cuda.memory import CudaStartError
from engine.backend.cuda.start import start_cuda
from engine.backend.torch_backend import TorchBackend
from engine.model.decoder import Decoder, load_decoder
from engine.sched.plan import PENDING, SequenceChunk, StepPlan
from engine.sched.request import Request
from engine.sched.sampling import SamplingParams
from tests.engine.cuda.answering import (
    BLOCK_SIZE,
    BLOCKS,
    MAX_RUNNING,
    STEP_TOKENS,
    TWO_LAYERS,
    agree,
    answers,
    cuda_backend,
    prompts,
    with_kernels,
)
from tests.engine.model.helpers import GREEDY, hf_model, save, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(hf_model("Qwen2", **TWO_LAYERS), tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Decoder:
    return load_decoder(folder, device="cuda:0")


def on_card(model: Decoder, graphs: int = 0) -> CudaBackend:
    backend = cuda_backend(model, CudaDevice(torch.device("cuda", 0)), graphs=graphs, forward=with_kernels(model))
    torch.cuda.synchronize()  # the pool is filled on another stream
    return backend


def settings(folder: Path, **fields: Any) -> Any:
    plain = {
        **{"model": folder, "device": "cuda", "dtype": "float32", "attention": "triton", "cuda_graphs": True},
        **{"block_size": BLOCK_SIZE, "max_step_tokens": STEP_TOKENS, "max_running": MAX_RUNNING, "max_model_len": 0},
        **{"kv_pool_tokens": BLOCKS * BLOCK_SIZE, "kv_cache_bytes": 0, "kv_memory_share": 0.5},
    }
    return SimpleNamespace(**{**plain, **fields})


def expected_answers(folder: Path) -> Any:
    reference = TorchBackend(load_decoder(folder), block_count=BLOCKS, block_size=BLOCK_SIZE)
    return asyncio.run(answers(reference, prompts()))


@pytest.mark.parametrize("graphs", [0, MAX_RUNNING])
def test_answers_are_those_of_the_cpu(folder: Path, model: Decoder, graphs: int) -> None:
    """In float32 only the order of summation differs, and the model's logits are further apart than that."""
    agree(asyncio.run(answers(on_card(model, graphs), prompts())), expected_answers(folder))


def test_started_as_the_program_starts_it(folder: Path) -> None:
    backend, blocks = start_cuda(settings(folder))
    assert blocks == BLOCKS
    assert backend._graphs is not None
    assert backend._graphs.captured == 4
    agree(asyncio.run(answers(backend, prompts())), expected_answers(folder))


def test_the_pool_takes_its_share_of_the_card(folder: Path) -> None:
    free = CudaDevice(torch.device("cuda", 0)).free_bytes()
    backend, _ = start_cuda(settings(folder, kv_pool_tokens=0, kv_memory_share=0.25, cuda_graphs=False))
    assert 0.2 * free < backend.pool.data.nbytes <= 0.25 * free
    with pytest.raises(CudaStartError, match=r"KV pool of .* blocks: lower --kv-cache-bytes"):
        start_cuda(settings(folder, kv_pool_tokens=0, kv_cache_bytes=1 << 50))


@pytest.fixture
def waiting_fails() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("graphs", [0, MAX_RUNNING])
def test_a_launch_never_waits_for_the_card(model: Decoder, graphs: int, request: pytest.FixtureRequest) -> None:
    backend = on_card(model, graphs)
    asked = [
        GREEDY,
        SamplingParams(seed=1, logprobs=3),
        SamplingParams(seed=2, top_k=5, top_p=0.9, min_p=0.01),
        SamplingParams(seed=3, top_p=0.9),
        SamplingParams(temperature=0, repetition_penalty=1.2, logit_bias={3: 2.0}),
    ]
    made = [Request(i, tokens(6, i), 9, p) for i, p in enumerate(asked)]
    first = tuple(SequenceChunk(r, 0, r.prompt_tokens, (2 * r.id, 2 * r.id + 1), True, False) for r in made)
    second = tuple(SequenceChunk(r, 6, (PENDING,), (2 * r.id, 2 * r.id + 1), True, True) for r in made[:4])
    expected = [backend.step(StepPlan(plan)).sampled for plan in (first, second)]  # compiling may wait for the card
    request.getfixturevalue("waiting_fails")
    launched = [backend._launch(plan) for plan in (first, second)]
    results = [backend._result(one) for one in launched]
    assert [result.sampled for result in results] == expected
    assert all(result.elapsed_s > 0 for result in results)


def test_a_graph_gives_what_the_step_without_gives(model: Decoder) -> None:
    outcomes = []
    for graphs in (0, MAX_RUNNING):
        backend = on_card(model, graphs)
        made = [Request(i, tokens(6, i), 9, SamplingParams(temperature=0, logprobs=5)) for i in range(3)]
        found = []
        for step in range(4):
            chunks = []
            for r in made:
                blocks = (3 * r.id, 3 * r.id + 1, 3 * r.id + 2)
                if step == 0:
                    chunks.append(SequenceChunk(r, 0, r.prompt_tokens, blocks[:2], True, False))
                else:
                    chunks.append(SequenceChunk(r, 5 + step, r.output_tokens[-1:], blocks, True, True))
            sampled = backend.step(StepPlan(tuple(chunks))).sampled
            for r in made:
                r.output_tokens.append(sampled[r.id].token)
            found.append(sampled)
        outcomes.append(found)
    # A matrix product that is padded to another number of rows may sum in another order.
    for plain, replayed in zip(*outcomes, strict=True):
        for i in plain:
            assert plain[i].token == replayed[i].token
            assert plain[i].logprob == pytest.approx(replayed[i].logprob, abs=1e-4)
