"""The measured models: their shapes, and weights made on the machine, equal for the engine and for transformers."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.model.config import ModelConfig, parse_config
from engine.model.decoder import Decoder
from engine.model.fields import Fields
from engine.model.weights import Shapes, _assemble, _Loader, tensor_shapes

_GAIN = 1.28
"""Standard deviation of a matrix's elements, times the square root of its number of columns. With 4096 columns, the
standard deviation is Llama's 0.02. Thus attention has as much effect in a small model as in a large one."""

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 65_536,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "tie_word_embeddings": False,
}
"""config.json of meta-llama/Meta-Llama-3-8B, except the context length, because 32k prompts must fit."""

TINY: dict[str, Any] = LLAMA_8B | {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
}
"""Small enough for Triton's interpreter."""


@dataclass(frozen=True, slots=True)
class Model:
    """A shape with its type and device."""

    fields: dict[str, Any]
    dtype: torch.dtype
    device: torch.device

    @property
    def config(self) -> ModelConfig:
        """Return the shape as the engine reads it."""
        return parse_config(Fields(self.fields, "benchmark"))

    def decoder(self) -> Decoder:
        """Return the engine's model, with matrices fused as when a checkpoint is loaded."""
        shapes = tensor_shapes(self.config)
        files: Any = _MadeTensors(shapes, self.dtype, self.device)
        loader = _Loader(files, shapes, self.dtype, self.device, self.config.head_dim)
        return Decoder(self.config, _assemble(loader, self.config))

    def transformers_model(self) -> Any:
        """Return transformers' model with the same weights."""
        from transformers import LlamaConfig, LlamaForCausalLM

        known = {key: value for key, value in self.fields.items() if key not in ("architectures", "model_type")}
        with torch.device(self.device):
            model = LlamaForCausalLM._from_config(
                LlamaConfig(**known, eos_token_id=None, bos_token_id=None, pad_token_id=None),
                dtype=self.dtype,
                attn_implementation="sdpa",
            ).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(made_tensor(name, tuple(parameter.shape), self.dtype, self.device))
        return model


def made_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the weight of this name: normal, reproducible on one kind of device. Norms are near one."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    std = _GAIN / math.sqrt(shape[-1])
    made = torch.empty(shape, dtype=dtype, device=device).normal_(0.0, std, generator=generator)
    return made.add_(1.0) if len(shape) == 1 else made


@dataclass(frozen=True, slots=True)
class _MadeTensors:
    """Replaces a checkpoint's files."""

    shapes: Shapes
    dtype: torch.dtype
    device: torch.device

    def read(self, name: str) -> Tensor:
        return made_tensor(name, self.shapes[name], self.dtype, self.device)
