"""A small but real Hugging Face checkpoint with random weights, for demos, tests and benchmarks.

    python -m engine.model.checkpoint --out PATH [--hidden-size N ...]

Writes config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json and
special_tokens_map.json of a Llama model. The tokenizer is a byte-level BPE trained on `corpus.txt`. The weights are
random, so the model's text has no meaning, but computing it takes as long as with a trained model of that size. The
chat template has tools and reasoning in the form of Hermes and Qwen.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from engine.model.config import DTYPES, parse_config
from engine.model.errors import ModelError
from engine.model.fields import Fields
from engine.model.weights import tensor_shapes

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)
_SMALLEST_VOCAB = 256 + len(_SPECIAL)

CHAT_TEMPLATE = """\
{%- set has_system = messages and messages[0]['role'] == 'system' -%}
{%- if has_system or tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if has_system %}{{- messages[0]['content'] -}}{% endif -%}
{%- if tools -%}
{{- '\\n\\n# Tools\\n\\nYou may call these functions:\\n<tools>\\n' -}}
{%- for tool in tools %}{{- tool | tojson + '\\n' -}}{% endfor -%}
{{- '</tools>\\n\\nFor each call, write:\\n<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in (messages[1:] if has_system else messages) -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['reasoning_content'] -%}
{{- '<think>\\n' + message['reasoning_content'] + '\\n</think>\\n\\n' -}}
{%- endif -%}
{%- if message['content'] %}{{- message['content'] -}}{% endif -%}
{%- for call in message['tool_calls'] or [] -%}
{%- if message['content'] or not loop.first %}{{- '\\n' -}}{% endif -%}
{{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' -}}
{{- call['function']['arguments'] | default({}) | tojson + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' -}}{% endif -%}
{%- endif -%}
"""


@dataclass(frozen=True, slots=True)
class CheckpointShape:
    """The size of the model. The default prefills 2,000 tokens in about half a second on one core of a server CPU."""

    hidden_size: int = 384
    layers: int = 5
    heads: int = 6
    kv_heads: int = 2
    intermediate_size: int = 1024
    vocab_size: int = 4096
    """Upper bound; the vocabulary is as large as the corpus allows, and at least 259."""
    max_position: int = 16384
    seed: int = 0
    dtype: str = "float32"


def make_checkpoint(folder: Path | str, **shape: int | str) -> CheckpointShape:
    """Write a checkpoint into `folder`, which is created. Keywords are the fields of `CheckpointShape`.

    Raises ModelError for a shape that no Llama model can have, OSError if the folder cannot be written.
    """
    size = CheckpointShape(**shape)  # type: ignore[arg-type]  # checked below, field by field
    if not isinstance(size.vocab_size, int) or size.vocab_size < _SMALLEST_VOCAB:
        raise ModelError(
            f"vocab_size ({size.vocab_size!r}) must be at least {_SMALLEST_VOCAB}: all bytes and special tokens"
        )
    tokenizer = train_tokenizer(size.vocab_size)
    config = _config(size, tokenizer)
    parsed = parse_config(Fields(config, "the checkpoint to make"))
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    shapes = tensor_shapes(parsed)
    tensors = _random_weights(shapes, getattr(torch, size.dtype), seed=size.seed, layers=size.layers)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    specials = {"eos_token": TURN_END, "pad_token": END_OF_TEXT, "additional_special_tokens": [TURN_START, TURN_END]}
    generation = {name: config[name] for name in ("eos_token_id", "pad_token_id")}
    _write(out / "config.json", config)
    _write(out / "generation_config.json", generation)
    _write(out / "special_tokens_map.json", specials)
    _write(out / "tokenizer_config.json", _tokenizer_config(size.max_position, specials))
    return size


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer of at most `vocab_size` entries, trained on the package's `corpus.txt`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = files("engine.model").joinpath("corpus.txt").read_text(encoding="utf-8")
    tokenizer.train_from_iterator(corpus.splitlines(keepends=True), trainer)
    return tokenizer


def _config(size: CheckpointShape, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": size.max_position,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500_000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": size.dtype,
        "bos_token_id": None,
        "eos_token_id": [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)],
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
    }


def _tokenizer_config(max_position: int, specials: dict[str, Any]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_position,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        **specials,
    }


def _random_weights(
    shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, *, seed: int, layers: int
) -> dict[str, Tensor]:
    """Return normal weights that keep activations near 1: variance 1 / fan-in, for residual outputs also divided by
    2 * layers (GPT-2's initialisation). Norms are 1."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            out[name] = torch.ones(shape, dtype=dtype)
            continue
        std = 1.0 if "embed_tokens" in name else shape[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std *= (2 * layers) ** -0.5
        out[name] = torch.empty(shape).normal_(0, std, generator=generator).to(dtype)
    return out


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    """Run the command line. Return exit status 0, or 2 with the reason on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.model.checkpoint", description="Write a small Llama checkpoint with random weights."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write; created if it does not exist")
    for field in fields(CheckpointShape):
        about = {"choices": DTYPES} if field.name == "dtype" else {"type": int}
        unit = "tokens, " if field.name in ("vocab_size", "max_position") else ""
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, default=field.default, help=f"{unit}default {field.default}", **about)
    arguments = vars(parser.parse_args(argv))
    out = arguments.pop("out")
    try:
        make_checkpoint(out, **arguments)
    except (ModelError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
