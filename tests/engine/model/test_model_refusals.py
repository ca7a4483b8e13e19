"""Unservable checkpoints are refused by name: fields of config.json, tensors, files."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.model.checkpoint import make_checkpoint
from engine.model.config import ModelConfig, parse_config
from engine.model.decoder import load_decoder
from engine.model.errors import ModelError
from engine.model.fields import Fields

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def parse(**changes: Any) -> ModelConfig:
    return parse_config(Fields({**LLAMA, **changes}, "config.json"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MixtralForCausalLM"]},
            "architectures (['MixtralForCausalLM']) is not supported; supported",
        ),
        ({"architectures": None}, "architectures (None) is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act ('gelu') is not supported; supported: silu, swish"),
        ({"quantization_config": {"bits": 4}}, "quantization_config ({'bits': 4}) is not supported; weights must be"),
        ({"hidden_size": None}, "hidden_size (None) must be an integer"),
        ({"hidden_size": True}, "hidden_size (True) must be an integer"),
        ({"hidden_size": "32"}, "hidden_size ('32') must be an integer"),
        ({"vocab_size": 0}, "vocab_size (0) must be at least 1"),
        ({"num_hidden_layers": -1}, "num_hidden_layers (-1) must be an integer that is not negative"),
        ({"num_key_value_heads": 3}, "num_key_value_heads (3) must divide num_attention_heads (4)"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size (32) must be a multiple of num_attention"),
        ({"head_dim": 7}, "head_dim (7) must be even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps (0) must be a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps (nan) must be a number above 0"),
        ({"attention_bias": "yes"}, "attention_bias ('yes') must be true or false"),
        ({"torch_dtype": "float64"}, "torch_dtype ('float64') is not supported; supported: float32"),
        ({"eos_token_id": "</s>"}, "eos_token_id ('</s>') must be a token id or a list"),
        ({"sliding_window": 8}, "sliding_window (8) is not supported for LlamaForCausalLM"),
        ({**QWEN2, "layer_types": ["full_attention"]}, "layer_types (['full_attention']) must name one of"),
        (
            {**QWEN2, "sliding_window": None, "layer_types": ["sliding_attention"] * 2},
            "names sliding_attention, but no sliding_window is in use",
        ),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "sliding_window": 8,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "must not name full_attention",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            "rope_scaling: rope_type ('longrope') is not supported; supported",
        ),
        ({"rope_scaling": {"type": "su"}}, "rope_scaling: type ('su') is not supported; supported: default, linear"),
        ({"rope_scaling": "linear"}, "rope_scaling ('linear') must be one object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "must be one object with a rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor (absent) must be a number above 0"),
        ({"rope_theta": -1}, "rope_theta (-1) must be a number above 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor (0.5) is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor (0.5) is not supported"),
        ({"rope_scaling": {**YARN, "beta_fast": -1}}, "beta_fast (-1) must be a number above 0"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor (4) must be above low_freq_factor",
        ),
    ],
)
def test_a_field_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as error:
        parse(**changes)
    assert str(error.value).startswith("config.json: ")
    assert message in str(error.value)


@pytest.mark.parametrize("name", [n for n in LLAMA if n != "num_key_value_heads"])
def test_a_missing_field_is_refused_by_name(name: str) -> None:
    with pytest.raises(ModelError, match=rf"{name} \(absent\)"):
        parse_config(Fields({k: v for k, v in LLAMA.items() if k != name}, "config.json"))


@given(st.sampled_from(sorted(LLAMA)), st.none() | st.booleans() | st.text() | st.floats() | st.lists(st.integers()))
def test_odd_values_never_escape_as_another_error(name: str, value: Any) -> None:
    with contextlib.suppress(ModelError):
        parse(**{name: value})


def test_old_and_new_spellings_mean_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    old = parse(rope_theta=5e5, rope_scaling={"type": "llama3", **scaling}, torch_dtype="bfloat16")
    new = parse(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling}, dtype="bfloat16")
    assert old == new
    assert (old.rope.theta, old.dtype, old.max_position) == (5e5, "bfloat16", 64)


def test_the_context_follows_the_scaling() -> None:
    assert parse(rope_scaling={"type": "linear", "factor": 2.5}).max_position == 160
    assert parse(rope_scaling={"type": "dynamic", "factor": 2.5}).max_position == 64
    assert parse(rope_scaling=YARN).max_position == 128
    assert parse(rope_scaling={**YARN, "factor": 1.5}).max_position == 64


def test_windows_by_architecture() -> None:
    assert parse().windows == (None, None)
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": 8}
    assert parse(**mistral).windows == (8, 8)
    assert parse(**QWEN2, max_window_layers=1).windows == (None, 8)
    assert parse(**QWEN2, layer_types=["sliding_attention", "full_attention"]).windows == (8, None)
    assert parse(**{**QWEN2, "use_sliding_window": False}).windows == (None, None)


def test_end_of_text_ids_of_both_files_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 2}))
    assert ModelConfig.from_path(tmp_path).eos_token_ids == {2}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert ModelConfig.from_path(tmp_path).eos_token_ids == {2, 5, 6}


@pytest.mark.parametrize("content", ["", "[]", "{", "\xff"])
def test_an_unreadable_config_is_refused_by_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json"):
        load_decoder(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate_size": 48, "vocab_size": 259}
    make_checkpoint(tmp_path, **sizes)
    return tmp_path


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Rewrite the checkpoint with tensors replaced, added, or (None) removed; `__` stands for a dot."""
    held = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        held.pop(name.replace("__", "."), None)
        if tensor is not None:
            held[name.replace("__", ".")] = tensor
    save_file(held, folder / "model.safetensors")


def test_missing_tensors_are_refused_by_name(folder: Path) -> None:
    change(folder, model__norm__weight=None, lm_head__weight=None)
    with pytest.raises(ModelError, match=r"lacks tensors lm_head\.weight, model\.norm\.weight"):
        load_decoder(folder)


def test_unexpected_tensors_are_refused_by_name(folder: Path) -> None:
    change(folder, model__layers__1__self_attn__q_proj__bias=torch.zeros(32))
    with pytest.raises(ModelError, match=r"holds tensor model\.layers\.1\.self_attn\.q_proj\.bias, which config"):
        load_decoder(folder)


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"lacks tensors model\.layers\.2\..* and 4 more"):
        load_decoder(folder)


def test_a_wrongly_shaped_tensor_is_refused_by_name(folder: Path) -> None:
    change(folder, model__norm__weight=torch.ones(31))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[31\]; config\.json calls for \[32\]"):
        load_decoder(folder)


def test_an_unsupported_storage_type_is_refused_by_name(folder: Path) -> None:
    change(folder, model__norm__weight=torch.ones(32, dtype=torch.int8))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is stored as I8; supported: F32, F16, BF16"):
        load_decoder(folder)


def test_harmless_tensors_are_passed_over(folder: Path) -> None:
    change(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    load_decoder(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    load_decoder(folder)  # the checkpoint has lm_head.weight besides a tied embedding


def test_an_unsupported_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="dtype 'int8' is not supported; supported: auto, float32, float16, bfloat16"):
        load_decoder(folder, dtype="int8")


def test_the_checkpoints_own_type_is_used_if_config_names_none(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["torch_dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load_decoder(folder).dtype == torch.float32


def test_absent_or_torn_weight_files_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"(?i)incomplete|invalid|header|buffer"):
        load_decoder(folder)
    weights.unlink()
    with pytest.raises(ModelError, match=r"holds neither model\.safetensors nor model\.safetensors\.index\.json"):
        load_decoder(folder)


@pytest.mark.parametrize("index", ["{", "{}", '{"weight_map": []}', '{"weight_map": {"a": "../b.safetensors"}}'])
def test_a_bad_index_is_refused(folder: Path, index: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"index\.json"):
        load_decoder(folder)


def test_an_absent_shard_is_refused_by_name(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(ModelError, match=r"gone\.safetensors"):
        load_decoder(folder)
