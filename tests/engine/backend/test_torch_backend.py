"""The torch backend: reuse of blocks, mixed steps, and the contract of `Backend`."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.backend.base import Backend
from engine.backend.torch_backend import TorchBackend
from engine.backend.torch_kv import blocks_for_budget
from engine.model.decoder import Decoder, load_decoder
from engine.model.errors import ModelError
from engine.sched.plan import SequenceChunk, StepPlan
from engine.sched.request import Request
from engine.sched.sampling import SamplingParams
from tests.engine.model.helpers import GREEDY, VOCAB, Driven, drive, hf_model, save, shuffled_blocks, tokens

BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    return save(hf_model("Qwen2", **window), tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Decoder:
    return load_decoder(folder)


def poisoned(model: Decoder, block_count: int) -> TorchBackend:
    backend = TorchBackend(model, block_count=block_count, block_size=BLOCK_SIZE)
    backend.pool.data.fill_(torch.nan)
    return backend


@given(prompt=st.integers(2, 45), cached=st.integers(0, 44), chunk_tokens=st.integers(1, 30), seed=st.integers(0, 9))
def test_warm_equals_cold(model: Decoder, prompt: int, cached: int, chunk_tokens: int, seed: int) -> None:
    """A prompt over reused blocks, and over the first rows of another block, gives the cold logits. All other rows are
    poisoned, and other sequences run in the same steps."""
    cached = min(cached, prompt - 1)
    backend = poisoned(model, 60)
    text = tokens(prompt, seed)
    cold_blocks, warm_blocks, other_blocks = shuffled_blocks(60, [14, 14, 14], seed)
    cold = Driven(text, cold_blocks)
    drive(backend, [cold], outputs=4, chunk_tokens=chunk_tokens)
    whole, rows = divmod(cached, BLOCK_SIZE)
    reused, source = cold_blocks[:whole], cold_blocks[whole] if rows else None
    backend.pool.data[[b for b in range(60) if b not in (*reused, source)]] = torch.nan
    backend.pool.data[cold_blocks[whole], :, :, rows:] = torch.nan
    warm = Driven(text, [*reused, *warm_blocks], done=cached, source=source)
    other = Driven(tokens(23, seed + 1), other_blocks)
    drive(backend, [other, warm], outputs=4, chunk_tokens=7)
    torch.testing.assert_close(torch.stack(warm.logits), torch.stack(cold.logits), atol=1e-5, rtol=0)
    assert warm.request.output_tokens == cold.request.output_tokens


def test_identical_prompts_share_reused_blocks_in_one_step(model: Decoder) -> None:
    backend = poisoned(model, 40)
    text = tokens(24)
    cold = Driven(text, list(range(10)))
    drive(backend, [cold], outputs=3, chunk_tokens=64)
    twins = [Driven(text, [*range(5), *range(10 * i, 10 * i + 5)], done=20) for i in (1, 2, 3)]
    drive(backend, twins, outputs=3, chunk_tokens=64)
    for twin in twins:
        torch.testing.assert_close(torch.stack(twin.logits), torch.stack(cold.logits), atol=1e-5, rtol=0)


def test_both_decode_paths_agree(model: Decoder) -> None:
    """float32 on the CPU takes the sparse path, and every other type and device takes the gathered one."""
    logits = []
    for sparse in (True, False):
        backend = poisoned(model, 60)
        backend._sparse = sparse
        sequences = [Driven(tokens(n, n), b) for n, b in zip((3, 17, 40), shuffled_blocks(60, [15] * 3), strict=True)]
        drive(backend, sequences, outputs=6, chunk_tokens=64)
        logits.append(torch.stack([row for s in sequences for row in s.logits]))
    torch.testing.assert_close(*logits, atol=1e-5, rtol=0)


def test_a_step_writes_only_its_own_slots(model: Decoder) -> None:
    backend = poisoned(model, 8)
    drive(backend, [Driven(tokens(6), [5, 2])], outputs=1, chunk_tokens=64)
    written = backend.pool.data.isfinite().all(dim=-1).all(dim=-1)  # [block, layer, 2, slot]
    expected = torch.zeros_like(written)
    expected[5], expected[2, :, :, :2] = True, True
    assert torch.equal(written, expected)


def chunk(
    prompt: list[int], blocks: list[int], request_id: int = 1, sampling: SamplingParams = GREEDY
) -> SequenceChunk:
    return SequenceChunk(Request(request_id, prompt, 5, sampling), 0, prompt, blocks, True, False)


async def test_run_answers_for_chunks_that_sample(folder: Path) -> None:
    backend: Backend = TorchBackend(load_decoder(folder), block_count=8, block_size=BLOCK_SIZE, threads=1)
    whole = chunk(tokens(6), [0, 1], 1, SamplingParams(temperature=0, logprobs=3))
    request = Request(2, tokens(9), 5, GREEDY)
    part = SequenceChunk(request, 0, request.prompt_tokens[:4], [2], False, False)
    result = await backend.run(StepPlan((part, whole)))
    assert list(result.sampled) == [1]
    assert result.elapsed_s > 0
    chosen = result.sampled[1]
    assert (chosen.token, chosen.logprob) == chosen.top[0]
    assert len(chosen.top) == 3
    only_part = await backend.run(
        StepPlan((SequenceChunk(request, 4, request.prompt_tokens[4:8], [2, 3], False, False),))
    )
    assert only_part.sampled == {}
    await backend.close()


async def test_a_step_runs_off_the_event_loop_and_outlives_its_cancelled_caller(model: Decoder) -> None:
    backend = TorchBackend(model, block_count=8, block_size=BLOCK_SIZE)
    begun, release, threads = threading.Event(), threading.Event(), []
    step = backend._step

    def held(plan: StepPlan) -> Any:
        threads.append(threading.current_thread())
        begun.set()
        assert release.wait(10)
        return step(plan)

    backend._step = held  # type: ignore[method-assign]
    caller = asyncio.create_task(backend.run(StepPlan((chunk(tokens(5), [0, 1]),))))
    await asyncio.to_thread(begun.wait, 10)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    closing = asyncio.create_task(backend.close())
    await asyncio.sleep(0)
    assert not closing.done()
    release.set()
    await asyncio.wait_for(closing, 10)
    assert threads[0] is not threading.main_thread()
    assert backend.pool.data[0].isfinite().all()
    with pytest.raises(RuntimeError):
        await backend.run(StepPlan((chunk(tokens(5), [0, 1]),)))
    await backend.close()


def test_the_pool_takes_the_bytes_it_says(model: Decoder) -> None:
    block_bytes = model.config.kv_bytes_per_token(4) * BLOCK_SIZE
    count = blocks_for_budget(model.config, 10 * block_bytes + 1, block_size=BLOCK_SIZE, dtype=torch.float32)
    assert count == 10
    assert TorchBackend(model, block_count=count, block_size=BLOCK_SIZE).pool.data.nbytes == 10 * block_bytes
    with pytest.raises(ValueError, match=f"{block_bytes - 1} bytes holds no block; one block takes {block_bytes}"):
        blocks_for_budget(model.config, block_bytes - 1, block_size=BLOCK_SIZE, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"block_count \(0\)"):
        TorchBackend(model, block_count=0, block_size=BLOCK_SIZE)


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "cpu:0", ""])
def test_an_unknown_device_is_refused(folder: Path, device: str) -> None:
    with pytest.raises(ModelError, match=r"device .* is not supported; supported: cpu, cuda, cuda:N"):
        load_decoder(folder, device=device)


def test_an_absent_cuda_device_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="device 'cuda:99' does not exist"):
        load_decoder(folder, device="cuda:99")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_the_cpu(folder: Path) -> None:
    logits = []
    for device in ("cpu", "cuda"):
        backend = poisoned(load_decoder(folder, device=device), 20)
        sequence = Driven(tokens(30), list(range(20)))
        drive(backend, [sequence], outputs=5, chunk_tokens=8)
        logits.append(torch.stack(sequence.logits).cpu())
    torch.testing.assert_close(*logits, atol=1e-3, rtol=0)


def test_tokens_of_the_vocabulary_are_sampled(model: Decoder) -> None:
    backend = poisoned(model, 8)
    result = backend._step(StepPlan((chunk(tokens(5), [0, 1], 3, SamplingParams(seed=4)),)))
    assert 0 <= result.sampled[3].token < VOCAB
