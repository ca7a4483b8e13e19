"""Everything that a checkpoint's weight files hold is used as transformers uses it, or refused by file and tensor."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.backend.torch_backend import TorchBackend
from engine.model.decoder import load_decoder
from engine.model.errors import ModelError
from tests.engine.model.helpers import Driven, drive, hf_model, save, tokens

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
INDEX = "model.safetensors.index.json"


def greedy(folder: Path, prompt: list[int], outputs: int) -> list[int]:
    backend = TorchBackend(load_decoder(folder), block_count=20, block_size=4)
    sequence = Driven(prompt, list(range(20)))
    drive(backend, [sequence], outputs=outputs, chunk_tokens=64)
    return sequence.request.output_tokens


def greedy_of_transformers(folder: Path, prompt: list[int], outputs: int) -> list[int]:
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    written = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=outputs, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return list(written[0, len(prompt) :].tolist())


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], shards: int, order: random.Random) -> None:
    """Write the tensors into one file, or into shards with an index."""
    (folder / "model.safetensors").unlink()
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {name: f"part-{order.randrange(shards)}.safetensors" for name in tensors}
    for file in set(weight_map.values()):
        held = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        save_file(held, folder / file, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@settings(max_examples=20)
@given(
    kind=st.sampled_from(["Llama", "Mistral", "Qwen2", "Qwen3"]),
    says_tied=st.booleans(),
    held=st.sampled_from(["embedding", "head", "both, equal", "both, different"]),
    shards=st.sampled_from([1, 3]),
    seed=st.integers(0, 100),
)
def test_whether_matrices_are_tied_is_decided_as_in_transformers(
    tmp_path_factory: pytest.TempPathFactory, kind: str, says_tied: bool, held: str, shards: int, seed: int
) -> None:
    folder = save(hf_model(kind, tie_word_embeddings=says_tied), tmp_path_factory.mktemp("tied"))
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors[EMBEDDING]
    tensors[HEAD] = embedding.flip(0).contiguous() if held == "both, different" else embedding.clone()
    if held == "embedding":
        del tensors[HEAD]
    if held == "head":
        del tensors[EMBEDDING]
    rewrite(folder, tensors, shards, random.Random(seed))
    if not says_tied and not held.startswith("both"):
        with pytest.raises(ModelError, match="lacks tensor"):
            load_decoder(folder)
        return
    model = load_decoder(folder)
    assert model.config.tied == (says_tied and held != "both, different")
    prompt = tokens(9, seed)
    assert greedy(folder, prompt, 8) == greedy_of_transformers(folder, prompt, 8)


def test_a_head_that_contradicts_the_config_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save(hf_model("Llama", tie_word_embeddings=True), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    rewrite(folder, {**tensors, HEAD: tensors[EMBEDDING] + 1}, 1, random.Random(0))
    load_decoder(folder)
    assert "lm_head.weight" in caplog.text
    assert "tie_word_embeddings" in caplog.text


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "pointer", "folder", "without a tensor"])
def test_a_damaged_shard_is_refused_by_its_path(tmp_path: Path, damage: str) -> None:
    save(hf_model("Qwen2"), tmp_path, max_shard_size="20KB")
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    name = sorted(set(weight_map.values()))[1]
    shard = tmp_path / name
    content = shard.read_bytes()
    tensors = load_file(shard)
    shard.unlink()
    if damage == "folder":
        shard.mkdir()
    elif damage == "without a tensor":
        gone = sorted(tensors)[0]
        save_file({key: value for key, value in tensors.items() if key != gone}, shard)
    elif damage != "missing":
        shard.write_bytes({"empty": b"", "cut": content[:-10], "pointer": b"version https://git-lfs"}[damage])
    with pytest.raises(ModelError) as error:
        load_decoder(tmp_path)
    assert str(shard) in str(error.value)


def test_one_file_goes_before_shards_as_in_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A merge may write one file and leave the shards and their index behind."""
    model = hf_model("Llama")
    merged = {name: tensor.flip(0).contiguous() for name, tensor in model.state_dict().items()}
    save(model, tmp_path, max_shard_size="20KB")
    save_file(merged, tmp_path / "model.safetensors", metadata={"format": "pt"})
    prompt = tokens(9, 0)
    assert greedy(tmp_path, prompt, 8) == greedy_of_transformers(tmp_path, prompt, 8)
    assert "model.safetensors is read, and the shards" in caplog.text


def test_a_tensor_in_two_shards_is_read_from_the_one_in_the_index(tmp_path: Path) -> None:
    save(hf_model("Llama"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = greedy(tmp_path, tokens(5), 8)
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "a.safetensors")
    save_file({EMBEDDING: tensors[EMBEDDING] * 2}, tmp_path / "b.safetensors")
    weight_map = dict.fromkeys(tensors, "a.safetensors")
    (tmp_path / "c.safetensors").write_bytes(b"not in the index, not read")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {**weight_map, "model.norm.weight": "a.safetensors"}}))
    assert greedy(tmp_path, tokens(5), 8) == expected
    norm = {"model.norm.weight": tensors["model.norm.weight"], EMBEDDING: tensors[EMBEDDING] * 2}
    save_file(norm, tmp_path / "b.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {**weight_map, "model.norm.weight": "b.safetensors"}}))
    assert greedy(tmp_path, tokens(5), 8) == expected
