"""transformers as the oracle: same logits and greedy tokens through the paged, chunked, batched backend."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch

from engine.backend.torch_backend import TorchBackend
from engine.model.decoder import load_decoder
from engine.model.projection import Projection
from tests.engine.model.helpers import Driven, drive, hf_model, save, shuffled_blocks, tokens

BLOCK_SIZE, OUTPUTS = 4, 20
PROMPTS = (37, 1, 16)
"""Lengths: longer than every window here; a single token; an exact multiple of the block."""


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0, **parameters}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, all biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, one kv head": ("Llama", {"num_key_value_heads": 1}),
    "llama, no shared kv heads": ("Llama", {"num_key_value_heads": 6}),
    "llama, wide heads": ("Llama", {"head_dim": 20}),
    "llama, linear": ("Llama", rope(rope_type="linear", factor=3.0)),
    "llama, dynamic": ("Llama", rope(rope_type="dynamic", factor=2.0)),
    "llama, llama3": (
        "Llama",
        rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama, yarn": ("Llama", rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama, yarn, all parameters": (
        "Llama",
        rope(
            rope_type="yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=1.2,
            mscale_all_dim=0.8,
            truncate=False,
        ),
    ),
    "mistral, window": ("Mistral", {"sliding_window": 7}),
    "mistral, window of one": ("Mistral", {"sliding_window": 1}),
    "mistral, window longer than the text": ("Mistral", {"sliding_window": 100}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2, window in upper layers": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3, biases, windows by layer": (
        "Qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


@pytest.mark.parametrize("chunk_tokens", [5, 64])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_are_those_of_transformers(case: str, chunk_tokens: int, tmp_path: Any) -> None:
    kind, config = CASES[case]
    theirs = hf_model(kind, **config)
    backend = TorchBackend(load_decoder(save(theirs, tmp_path)), block_count=60, block_size=BLOCK_SIZE)
    backend.pool.data.fill_(torch.nan)
    blocks = shuffled_blocks(60, [(n + OUTPUTS) // BLOCK_SIZE + 1 for n in PROMPTS])
    sequences = [Driven(tokens(n, seed=n), b) for n, b in zip(PROMPTS, blocks, strict=True)]
    drive(backend, sequences, outputs=OUTPUTS, chunk_tokens=chunk_tokens)
    for sequence in sequences:
        first = len(sequence.prompt) - 1
        with torch.inference_mode():
            expected = theirs(torch.tensor([sequence.known[:-1]])).logits[0, first:]
        torch.testing.assert_close(torch.stack(sequence.logits), expected, atol=1e-4, rtol=0)
        assert sequence.request.output_tokens == expected.argmax(dim=-1).tolist()
        assert expected.std() > 0.1, "a model with flat logits would make this test empty"


def test_generate_of_transformers_writes_the_same_text(tmp_path: Any) -> None:
    theirs = hf_model("Qwen3", head_dim=16)
    backend = TorchBackend(load_decoder(save(theirs, tmp_path)), block_count=20, block_size=BLOCK_SIZE)
    sequence = Driven(tokens(11), list(range(20)))
    drive(backend, [sequence], outputs=30, chunk_tokens=8)
    prompt = torch.tensor([sequence.prompt])
    written = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=30, do_sample=False)
    assert sequence.request.output_tokens == written[0, 11:].tolist()


def test_shards_make_the_same_model_as_one_file(tmp_path: Any) -> None:
    theirs = hf_model("Qwen2")
    save(theirs, tmp_path / "one")
    save(theirs, tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = (load_decoder(tmp_path / name, dtype="float16").weights for name in ("one", "many"))
    assert len(matrices(one)) > 20
    for ours, whole in zip(matrices(many), matrices(one), strict=True):
        assert torch.equal(ours, whole)


def matrices(part: Any) -> list[torch.Tensor]:
    """Return all tensors of a model's weights. Projections that are not float32 have plain tensors."""
    if isinstance(part, torch.Tensor):
        return [part]
    if isinstance(part, Projection):
        assert part.plain is not None
        return matrices(part.plain)
    if is_dataclass(part):
        return matrices([getattr(part, one.name) for one in fields(part)])
    return [] if part is None else [tensor for one in part for tensor in matrices(one)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("stored", ["float32", "same"])
def test_half_precision_follows_float32(dtype: str, stored: str, tmp_path: Any) -> None:
    """The weights are converted at loading, or stored in that type with dtype "auto". Both decode paths are used."""
    theirs = hf_model("Mistral", sliding_window=9)
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens(30)])).logits[0, -1]
    save(theirs.to(getattr(torch, dtype)) if stored == "same" else theirs, tmp_path)
    model = load_decoder(tmp_path, dtype="auto" if stored == "same" else dtype)
    assert model.dtype == getattr(torch, dtype)
    backend = TorchBackend(model, block_count=20, block_size=BLOCK_SIZE)
    backend.pool.data.fill_(torch.nan)
    sequence = Driven(tokens(30), list(range(20)))
    drive(backend, [sequence], outputs=10, chunk_tokens=8)
    assert torch.stack(sequence.logits).isfinite().all()
    torch.testing.assert_close(sequence.logits[0], expected, atol=0.15 * float(expected.abs().max()), rtol=0)
