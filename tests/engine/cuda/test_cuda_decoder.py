"""The decoder on CUDA kernels against the decoder in plain torch, over tiny checkpoints of every architecture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backend.cuda.attention import TritonAttention
from engine.backend.cuda.decoder import CudaDecoder, DecoderBuffers
from engine.backend.torch_kv import KvPool
from engine.model.decoder import Decoder, load_decoder
from engine.sched.plan import SequenceChunk
from engine.sched.request import Request
from tests.engine.cuda.stepping import BLOCK_SIZE, Steps, TorchAttention, check_mixed_steps, poison, step_of
from tests.engine.model.helpers import GREEDY, VOCAB, Driven, drive, hf_model, save, tokens

_YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True, "rope_parameters": _YARN, "tie_word_embeddings": True},
    "Mistral": {"sliding_window": 11, "head_dim": 10},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "Qwen3": {"head_dim": 16},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    models = {kind: hf_model(kind, num_hidden_layers=2, **more) for kind, more in MODELS.items()}
    return {kind: save(model, tmp_path_factory.mktemp(kind)) for kind, model in models.items()}


def load(folder: Path, device: torch.device, dtype: str = "float32") -> Decoder:
    return load_decoder(folder, dtype=dtype, device=str(device))


def triton_attention(model: Decoder) -> TritonAttention:
    return TritonAttention(model.config, rows=20, tokens=80, device=model.device)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, "float32") for kind in MODELS), ("Llama", "float16"), ("Qwen3", "float16"), ("Qwen2", "bfloat16")],
)
def test_logits_are_the_torch_backends(folders: dict[str, Path], device: torch.device, kind: str, dtype: str) -> None:
    model = load(folders[kind], device, dtype)
    check_mixed_steps(model, TorchAttention(model.config))


@pytest.mark.parametrize("kind", ["Qwen2"])
def test_logits_with_the_kernels_attention(folders: dict[str, Path], device: torch.device, kind: str) -> None:
    """A model with a window in its second layer only."""
    model = load(folders[kind], device)
    check_mixed_steps(model, triton_attention(model))


def test_warm_equals_cold_bit_for_bit(folders: dict[str, Path], device: torch.device) -> None:
    """A prompt whose first blocks are cached has the same logits as one computed in chunks that end at the same places.
    All else in pool and buffers is poisoned."""
    model = load(folders["Mistral"], device, "bfloat16")
    text, cached = tokens(19), 12
    steps = Steps(model, triton_attention(model), block_count=20, block_size=BLOCK_SIZE)
    cold = Driven(text, list(range(10)))
    drive(steps, [cold], outputs=3, chunk_tokens=cached)  # type: ignore[arg-type]
    steps.pool.data[cached // BLOCK_SIZE :] = torch.nan
    warm = Driven(text, [*range(cached // BLOCK_SIZE), *range(19, 10, -1)], done=cached)
    drive(steps, [warm], outputs=3, chunk_tokens=cached)  # type: ignore[arg-type]
    assert torch.equal(torch.stack(warm.logits), torch.stack(cold.logits))
    assert torch.stack(warm.logits).isfinite().all()


def chunk(prompt: list[int], blocks: list[int]) -> SequenceChunk:
    return SequenceChunk(Request(1, prompt, 5, GREEDY), 0, prompt, blocks, True, False)


def poisoned_pool(model: Decoder, block_count: int) -> Tensor:
    pool = KvPool(model.config, block_count, BLOCK_SIZE, dtype=model.dtype, device=model.device).data
    return pool.fill_(torch.nan)


@torch.inference_mode()
def test_which_rows_of_logits(folders: dict[str, Path], device: torch.device) -> None:
    """All rows, some in any order, and none: keys and values are stored in each case."""
    model = load(folders["Qwen2"], device)
    decoder, attention = CudaDecoder(model), TorchAttention(model.config)
    step = step_of(model.config, BLOCK_SIZE, [chunk(tokens(6), [5, 2])], device=device)
    some = torch.tensor([4, 0, 3], device=device)
    pools, logits = [], []
    for rows in (None, some, some[:0]):
        pools.append(poisoned_pool(model, 8))
        logits.append(decoder.forward(replace(step, rows=rows), pools[-1], attention))
    assert [row.shape for row in logits] == [(6, VOCAB), (3, VOCAB), (0, VOCAB)]
    torch.testing.assert_close(logits[1], logits[0][[4, 0, 3]], atol=1e-5, rtol=0)
    for pool in pools:
        written = pool.isfinite().all(-1).all(-1)
        expected = torch.zeros_like(written)
        expected[5], expected[2, :, :, :2] = True, True
        assert torch.equal(written, expected)


@torch.inference_mode()
def test_nothing_but_the_named_rows_of_buffers_is_used(folders: dict[str, Path], device: torch.device) -> None:
    """A step smaller than its buffers does not touch the rest of them."""
    model = load(folders["Qwen3"], device, "bfloat16")
    decoder = CudaDecoder(model)
    buffers = decoder.buffers(9, 3)
    poison(buffers)
    step = step_of(model.config, BLOCK_SIZE, [chunk(tokens(6), [1, 3])], device=device)
    logits = decoder.forward(step, poisoned_pool(model, 4), TorchAttention(model.config), buffers)
    assert logits.data_ptr() == buffers.logits.data_ptr()
    assert logits.isfinite().all()
    for name in buffers.__slots__:
        rest = getattr(buffers, name)[1 if len(getattr(buffers, name)) == 3 else 6 :]
        assert len(rest) in (2, 3)
        assert rest.isnan().all(), name
    with pytest.raises(
        ValueError, match="a step of 10 tokens and 1 rows of logits is larger than the buffers, made for 9"
    ):
        buffers.leading(10, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_take_the_bytes_they_say(folders: dict[str, Path], dtype: torch.dtype) -> None:
    config = load_decoder(folders["Llama"]).config
    meta, real = (
        DecoderBuffers.make(config, tokens=5, rows=2, dtype=dtype, device=torch.device(kind)).nbytes
        for kind in ("meta", "cpu")
    )
    # The hidden size is 48. There are 6 + 2 * 2 heads of 8, 40 inner dimensions and 97 tokens in the vocabulary.
    by_token, by_row = 2 * 48 + 80 + 48 + 3 * 40, 48 + 48 + 97
    logits = 0 if dtype == torch.float32 else 2 * 97 * 4
    assert meta == real == (5 * by_token + 2 * by_row) * dtype.itemsize + logits
