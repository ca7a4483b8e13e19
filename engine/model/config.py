"""Reads and checks a decoder's Hugging Face `config.json`, without torch.

Field names and defaults are those of the `*Config` classes of transformers 5, by architecture. Older spellings
(`torch_dtype`, `rope_theta`, `rope_scaling`) are read too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.model.fields import Fields, read_fields
from engine.model.generation import GENERATION_FILE
from engine.model.rope_config import RopeConfig

DTYPES = ("float32", "float16", "bfloat16")

_LLAMA, _MISTRAL, _QWEN2, _QWEN3 = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
ARCHITECTURES = (_LLAMA, _MISTRAL, _QWEN2, _QWEN3)
_QWEN3_HEAD_DIM = 128
"""Qwen3Config's default; the other architectures divide hidden_size among the heads."""
_KV_HEADS = {_MISTRAL: 8, _QWEN2: 32, _QWEN3: 32}
"""Default of `num_key_value_heads` if it is absent. If it is null, and in LlamaConfig, it is the number of heads."""
_WINDOW = 4096
"""Default of `sliding_window` if it is absent; null: no window."""
_MAX_WINDOW_LAYERS = 28
"""Default of `max_window_layers`: Qwen's first layers have no window."""
_MODEL_TYPES = {_LLAMA: "llama", _MISTRAL: "mistral", _QWEN2: "qwen2", _QWEN3: "qwen3"}
HARMLESS = frozenset(
    {
        "_attn_implementation",
        "_commit_hash",
        "_name_or_path",
        "attention_dropout",
        "attn_implementation",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "finetuning_task",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "is_decoder",
        "keys_to_ignore_at_inference",
        "label2id",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
"""Keys of config.json that have no effect on an answer: they are about training, files, other tasks, or the way to
compute."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder of one of `ARCHITECTURES`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    """Tokens that the model can address, prompt and output together."""
    rope: RopeConfig
    windows: tuple[int | None, ...]
    """Window per layer: a token sees itself and the window - 1 tokens before it; None: all tokens before it."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    """Whether the output projection is the input embedding."""
    dtype: str | None
    """The checkpoint's type, one of `DTYPES`; None if it declares none."""
    eos_token_ids: frozenset[int]
    """Ids that end a text, from config.json and generation_config.json together."""

    @staticmethod
    def from_path(path: Path | str) -> ModelConfig:
        """Return the config of the checkpoint in folder `path`. Raises ModelError naming file and field."""
        folder = Path(path)
        generation = folder / GENERATION_FILE
        eos = read_fields(generation).token_ids("eos_token_id") if generation.exists() else frozenset()
        return parse_config(read_fields(folder / "config.json"), eos)

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Return the bytes of one token's keys and values in all layers together."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes


def parse_config(fields: Fields, more_eos: frozenset[int] = frozenset()) -> ModelConfig:
    """Return the config in the content of a `config.json`. Raises ModelError naming the field."""
    architecture = _architecture(fields)
    if fields.get("quantization_config") is not None:
        raise fields.error("quantization_config", f"is not supported; weights must be {', '.join(DTYPES)}")
    fields.choice("hidden_act", ("silu", "swish"))  # two names of one function
    heads, hidden_size = fields.positive_int("num_attention_heads"), fields.positive_int("hidden_size")
    kv_heads = _kv_heads(fields, architecture, heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"must divide num_attention_heads ({heads})")
    attention_bias = architecture in (_LLAMA, _QWEN3) and fields.boolean("attention_bias", default=False)
    rope, max_position = RopeConfig.parse(fields)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.positive_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int("intermediate_size"),
        layers=fields.positive_int("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(fields, architecture, hidden_size, heads),
        rms_norm_eps=fields.positive_number("rms_norm_eps"),
        max_position=max_position,
        rope=rope,
        windows=_windows(fields, architecture),
        qkv_bias=attention_bias or architecture == _QWEN2,
        output_bias=attention_bias,
        mlp_bias=architecture == _LLAMA and fields.boolean("mlp_bias", default=False),
        qk_norm=architecture == _QWEN3,
        tied=fields.boolean("tie_word_embeddings", default=False),
        dtype=_dtype(fields),
        eos_token_ids=fields.token_ids("eos_token_id") | more_eos,
    )


def unread_config(folder: Path) -> dict[str, Any]:
    """Return the entries of config.json that the engine does not use although they might change an answer.

    Raises ModelError.
    """
    fields = read_fields(folder / "config.json")
    config = parse_config(fields)
    kind = fields.get("model_type")
    unread = {name: value for name, value in fields.unread().items() if name not in HARMLESS}
    return unread if kind in (None, _MODEL_TYPES[config.architecture]) else {"model_type": kind, **unread}


def _kv_heads(fields: Fields, architecture: str, heads: int) -> int:
    is_null = "num_key_value_heads" in fields.content
    return fields.positive_int("num_key_value_heads", default=heads if is_null else _KV_HEADS.get(architecture, heads))


def _architecture(fields: Fields) -> str:
    named = fields.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in ARCHITECTURES:
        raise fields.error("architectures", f"is not supported; supported: {', '.join(ARCHITECTURES)}")
    return str(named[0])


def _head_dim(fields: Fields, architecture: str, hidden_size: int, heads: int) -> int:
    default = _QWEN3_HEAD_DIM if architecture == _QWEN3 else hidden_size // heads
    if fields.get("head_dim") is None and architecture != _QWEN3 and hidden_size % heads:
        raise fields.error("hidden_size", f"must be a multiple of num_attention_heads ({heads}) if head_dim is absent")
    head_dim = fields.positive_int("head_dim", default=default)
    if head_dim % 2:
        raise fields.error("head_dim", "must be even: rotary embedding rotates pairs")
    return head_dim


def _windows(fields: Fields, architecture: str) -> tuple[int | None, ...]:
    """Return the sliding window of each layer (Qwen: only if `use_sliding_window`, and only in the named layers)."""
    layers = fields.positive_int("num_hidden_layers")
    is_qwen = architecture in (_QWEN2, _QWEN3)
    window = None
    if "sliding_window" not in fields.content:
        window = None if architecture == _LLAMA else _WINDOW
    elif fields.get("sliding_window") is not None:
        window = fields.positive_int("sliding_window")
    if is_qwen and not fields.boolean("use_sliding_window", default=False):
        window = None
    if architecture == _LLAMA and window is not None:
        raise fields.error("sliding_window", f"is not supported for {_LLAMA}; it is for {_MISTRAL}, {_QWEN2}, {_QWEN3}")
    first = fields.integer("max_window_layers", default=_MAX_WINDOW_LAYERS) if is_qwen else 0
    types = fields.get("layer_types")
    if types is None:
        return tuple(window if i >= first else None for i in range(layers))
    return tuple(_layer_window(fields, types, window, layers, architecture))


def _layer_window(fields: Fields, types: Any, window: int | None, layers: int, architecture: str) -> list[int | None]:
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers or any(t not in known for t in types):
        raise fields.error("layer_types", f"must name one of {', '.join(known)} for each of the {layers} layers")
    if window is None and "sliding_attention" in types:
        raise fields.error("layer_types", "names sliding_attention, but no sliding_window is in use")
    if architecture == _MISTRAL and window is not None and "full_attention" in types:
        raise fields.error(
            "layer_types", f"must not name full_attention: in {_MISTRAL} the window applies to all layers"
        )
    return [window if t == "sliding_attention" else None for t in types]


def _dtype(fields: Fields) -> str | None:
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    return None if fields.get(name) is None else fields.choice(name, DTYPES)
