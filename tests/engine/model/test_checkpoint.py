"""The checkpoint that demos use: transformers must read it like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.backend.torch_backend import TorchBackend
from engine.model.checkpoint import main, make_checkpoint
from engine.model.config import ModelConfig
from engine.model.decoder import load_decoder
from engine.model.errors import ModelError
from tests.engine.model.helpers import Driven, drive

SMALL = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 48, "max_position": 512}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made")
    make_checkpoint(path, **SMALL)
    return path


def test_transformers_loads_it_and_agrees(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two of some thirty runs of all tests the logits of transformers differed, as with wrong rotary frequencies.
    They never did in thousands of runs of this test alone. So the test fixes threads, frequencies and kernels."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    written = load_file(folder / "model.safetensors")
    loaded = theirs.state_dict()
    assert [name for name, weight in written.items() if not torch.equal(loaded[name], weight)] == []
    rotary = theirs.model.rotary_emb
    rotary.inv_freq.copy_(rotary.compute_default_rope_parameters(theirs.config)[0])  # no file holds the frequencies
    text = "The router sends each request to the machine that remembers its prefix — naïve, 日本語 🚀\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids) < theirs.config.vocab_size == len(tokenizer)
    backend = TorchBackend(load_decoder(folder), block_count=20, block_size=16)
    sequence = Driven(ids, list(range(20)))
    drive(backend, [sequence], outputs=1, chunk_tokens=64)
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(sequence.logits[0], expected, atol=1e-4, rtol=0)


def test_the_vocabulary_is_worth_having(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) > 2000
    text = "Requests that share a prefix reuse the blocks of the cache."
    assert len(tokenizer.encode(text)) < len(text) / 3


def test_the_chat_template_renders_turns_tools_and_the_generation_prompt(folder: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "Be kind. "}, {"role": "user", "content": " hi\n"}]
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    rendered = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    start, end = "<|im_start|>", "<|im_end|>\n"
    assert rendered.startswith(f"{start}system\nBe kind. \n\n# Tools")
    assert json.dumps(tools[0]) in rendered
    assert rendered.endswith(f"{end}{start}user\n hi\n{end}{start}assistant\n")
    plain = tokenizer.apply_chat_template(messages[1:], tokenize=False)
    assert plain == f"{start}user\n hi\n{end}"
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "look_up"}}]}
    assert "look_up" in tokenizer.apply_chat_template([*messages, call], tokenize=False)


def test_special_tokens_are_one_id_each_and_end_the_text(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    specials = [tokenizer.encode(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    assert [len(ids) for ids in specials] == [1, 1, 1]
    assert tokenizer.eos_token == "<|im_end|>"
    config = ModelConfig.from_path(folder)
    assert config.eos_token_ids == {specials[0][0], specials[2][0]}
    assert config.max_position == tokenizer.model_max_length == 512


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_checkpoint(tmp_path / name, **SMALL, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_the_command_line_writes_what_it_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    assert main(["--out", str(tmp_path / "made"), "--vocab-size=300", "--dtype=bfloat16", *flags]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "made")
    config = ModelConfig.from_path(tmp_path / "made")
    assert (config.hidden_size, config.layers, config.vocab_size, config.dtype) == (32, 2, 300, "bfloat16")
    assert load_decoder(tmp_path / "made").dtype == torch.bfloat16


def test_impossible_shapes_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path), "--heads=5", "--kv-heads=2"]) == 2
    assert "num_key_value_heads (2) must divide num_attention_heads (5)" in capsys.readouterr().err
    with pytest.raises(ModelError, match=r"vocab_size \(100\) must be at least 259"):
        make_checkpoint(tmp_path, vocab_size=100)
    with pytest.raises(ModelError, match=r"dtype \('int8'\) is not supported"):
        make_checkpoint(tmp_path, dtype="int8")
    assert list(tmp_path.iterdir()) == []
