"""Every key of config.json and generation_config.json means what it means in transformers, or is named as unread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.config import HARMLESS, ModelConfig, unread_config
from engine.model.errors import ModelError
from engine.model.generation import Generation
from tests.engine.model.test_model_refusals import LLAMA

REQUIRED = {**LLAMA, "num_attention_heads": 32, "hidden_size": 128, "num_hidden_layers": 30}
ROPE = {"rope_type": "linear", "factor": 2.0}
OPTIONAL: dict[str, st.SearchStrategy[Any]] = {
    "num_key_value_heads": st.sampled_from([None, 1, 2, 4, 8, 16, 32]),
    "head_dim": st.sampled_from([16, 64]),
    "tie_word_embeddings": st.booleans(),
    "attention_bias": st.booleans(),
    "sliding_window": st.sampled_from([None, 1, 16]),
    "use_sliding_window": st.booleans(),
    "max_window_layers": st.integers(0, 31),
    "rope_theta": st.sampled_from([5e5, 1e6]),
    "rope_parameters": st.sampled_from([None, {"rope_theta": 2e4, "rope_type": "default"}, {"rope_theta": 3e4}]),
    "rope_scaling": st.sampled_from([None, {}, ROPE, {**ROPE, "rope_theta": 4e4}]),
}


def written(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@settings(max_examples=200)
@given(kind=st.sampled_from(["Llama", "Mistral", "Qwen2", "Qwen3"]), given=st.fixed_dictionaries({}, optional=OPTIONAL))
def test_absent_null_and_given_keys_mean_what_they_mean_in_transformers(
    tmp_path_factory: pytest.TempPathFactory, kind: str, given: dict[str, Any]
) -> None:
    if kind == "Llama":
        given = {name: value for name, value in given.items() if name != "sliding_window"}  # refused by name
    required = {name: value for name, value in REQUIRED.items() if name != "num_key_value_heads"}
    model_type = {"architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower()}
    folder = written(tmp_path_factory.mktemp("config"), {**required, **model_type, **given})
    theirs = transformers.AutoConfig.from_pretrained(folder)
    ours = ModelConfig.from_path(folder)
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.tied == theirs.tie_word_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope.variant == theirs.rope_parameters["rope_type"]
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * ours.layers
    window = getattr(theirs, "sliding_window", None)
    assert ours.windows == tuple(window if one == "sliding_attention" else None for one in types)


MEANINGLESS: st.SearchStrategy[Any] = st.sampled_from([None, False, "", [], {}])
MEANING: st.SearchStrategy[Any] = st.sampled_from([True, 1, 0.5, "some", [1], {"a": 1}])
STRANGE = st.sampled_from(
    ["logit_scale", "final_logit_softcapping", "residual_multiplier", "text_config", "auto_map", "top_p", "mup_scale"]
)


@given(strange=st.dictionaries(STRANGE, MEANING), silent=st.dictionaries(STRANGE, MEANINGLESS), data=st.data())
def test_every_key_that_is_not_read_is_named(
    tmp_path_factory: pytest.TempPathFactory, strange: dict[str, Any], silent: dict[str, Any], data: st.DataObject
) -> None:
    harmless = data.draw(st.dictionaries(st.sampled_from(sorted(HARMLESS - {"torch_dtype", "dtype"})), MEANING))
    folder = written(tmp_path_factory.mktemp("config"), {**LLAMA, **harmless, **silent, **strange})
    assert unread_config(folder) == strange


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("rope_type", ["default", "linear", "dynamic", "llama3", "yarn"])
def test_no_key_that_transformers_writes_is_named(tmp_path: Path, kind: str, rope_type: str) -> None:
    more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope_type == "llama3" else {}
    scaling = {} if rope_type == "default" else {"factor": 2.0}
    rope = {"rope_type": rope_type, "rope_theta": 1e4, **scaling, **more}
    config = getattr(transformers, f"{kind}Config")(rope_parameters=rope, architectures=[f"{kind}ForCausalLM"])
    config.save_pretrained(tmp_path)
    assert unread_config(tmp_path) == {}


def test_keys_of_the_position_embedding_are_named_too(tmp_path: Path) -> None:
    config = {**LLAMA, "rope_scaling": {**ROPE, "attention_factor": 2.0}, "rope_parameters": {"rope_theta": 5.0}}
    unread = unread_config(written(tmp_path, config))
    assert unread == {"rope_scaling.attention_factor": 2.0, "rope_parameters": {"rope_theta": 5.0}}


def test_a_model_type_of_another_architecture_is_named(tmp_path: Path) -> None:
    assert unread_config(written(tmp_path, {**LLAMA, "model_type": "llama"})) == {}
    assert unread_config(written(tmp_path, {**LLAMA, "model_type": "mistral"})) == {"model_type": "mistral"}


SAMPLING = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 100),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.01, 10),
}
ADVISED = st.fixed_dictionaries({}, optional=SAMPLING)
UNREAD = st.fixed_dictionaries(
    {},
    optional={
        "num_beams": st.integers(2, 4),
        "no_repeat_ngram_size": st.integers(1, 4),
        "suppress_tokens": st.just([1, 2]),
        "bad_words_ids": st.just([[1]]),
        "stop_strings": st.just(["x"]),
        "min_new_tokens": st.just(3),
        "typical_p": st.just(0.5),
        "made_up": st.just(1),
    },
)


@given(advised=ADVISED, longest=st.none() | st.integers(1, 99), unread=UNREAD)
def test_sampling_is_read_and_the_rest_named(
    tmp_path_factory: pytest.TempPathFactory, advised: dict[str, Any], longest: int | None, unread: dict[str, Any]
) -> None:
    content = {**advised, **unread, "max_new_tokens": longest, "do_sample": True, "eos_token_id": [1, 2]}
    made = Generation.from_path(written(tmp_path_factory.mktemp("generation"), LLAMA, content))
    assert made == Generation(advised, longest, unread)


def test_what_transformers_writes_by_itself_is_not_named(tmp_path: Path) -> None:
    transformers.GenerationConfig(do_sample=True, top_p=0.9, eos_token_id=[1], pad_token_id=0).save_pretrained(tmp_path)
    assert Generation.from_path(tmp_path) == Generation({"top_p": 0.9})
    defaults = transformers.GenerationConfig(do_sample=True).to_dict()
    assert Generation.from_path(written(tmp_path, LLAMA, defaults)).unread == {}


def test_greedy_decoding_as_a_default_is_named_unless_the_temperature_says_it(tmp_path: Path) -> None:
    assert Generation.from_path(written(tmp_path, LLAMA, {"do_sample": False})).unread == {"do_sample": False}
    assert Generation.from_path(written(tmp_path, LLAMA, {"do_sample": False, "temperature": 0})).unread == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", bad) for bad in (-1, 3, "1", True, float("nan"))),
        *(("top_p", bad) for bad in (0, 1.5)),
        *(("top_k", bad) for bad in (-2, 10**400)),
        *(("max_new_tokens", bad) for bad in (0, 1.5, "7")),
    ],
)
def test_impossible_sampling_is_refused_by_file_and_key(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(ModelError, match=rf"generation_config\.json: {name} "):
        Generation.from_path(written(tmp_path, LLAMA, {name: value}))


def test_silu_has_two_names(tmp_path: Path) -> None:
    folders = [written(tmp_path / name, {**LLAMA, "hidden_act": name}) for name in ("silu", "swish")]
    assert ModelConfig.from_path(folders[0]) == ModelConfig.from_path(folders[1])
    values = torch.linspace(-5, 5, 101)
    functions = transformers.activations.ACT2FN
    assert torch.equal(functions["silu"](values), functions["swish"](values))
