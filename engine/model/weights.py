"""Loads a checkpoint's safetensors: checks every name and shape first, then reads one tensor at a time.

Peak memory is the model plus one fused matrix: its parts are copied into place as they are read, then it may be packed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.model.config import DTYPES, ModelConfig
from engine.model.errors import ModelError
from engine.model.projection import Projection
from engine.model.rope import interleaved

_STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NAMES_SHOWN = 5
_ROTATED = ("q_proj", "k_proj", "q_norm", "k_norm")
"""Modules whose outputs are rotated pairs."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. None: the architecture has no such part. Query and key dimensions are `rope.interleaved`."""

    input_norm: Tensor
    qkv: Projection
    """Its outputs are the query, key and value heads, in this order."""
    qk_norm: Tensor | None
    """[heads + kv_heads, head_dim]"""
    output: Projection
    mlp_norm: Tensor
    gate_up: Projection
    """Its outputs are gate, then up."""
    down: Projection


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A whole decoder."""

    embedding: Tensor
    """[vocab_size, hidden_size]"""
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Projection


Shapes = dict[str, tuple[int, ...]]


def load_weights(folder: Path, config: ModelConfig, *, dtype: str = "auto", device: str = "cpu") -> ModelWeights:
    """Load the weights onto `device`. `dtype` is one of `DTYPES`, or "auto": the checkpoint's.

    Raises ModelError naming a missing, unexpected, wrongly shaped or unsupported tensor, or an unreadable file.
    """
    if dtype not in ("auto", *DTYPES):
        raise ModelError(f"dtype {dtype!r} is not supported; supported: auto, {', '.join(DTYPES)}")
    try:
        files = _Files(folder)
        expected = tensor_shapes(config)
        _check(files, expected, config.tied)
        name = (config.dtype or files.dtype("model.embed_tokens.weight")) if dtype == "auto" else dtype
        return _assemble(_Loader(files, expected, getattr(torch, name), torch.device(device), config.head_dim), config)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder}: {error}") from None


def tensor_shapes(config: ModelConfig) -> Shapes:
    """Return name -> shape of every tensor that a checkpoint of `config` must hold."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    matrices = {
        "self_attn.q_proj": (config.heads * dim, hidden, config.qkv_bias),
        "self_attn.k_proj": (config.kv_heads * dim, hidden, config.qkv_bias),
        "self_attn.v_proj": (config.kv_heads * dim, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, config.heads * dim, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    vectors = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        vectors |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
    for i in range(config.layers):
        prefix = f"model.layers.{i}."
        for name, (rows, columns, biased) in matrices.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if biased:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        for name, size in vectors.items():
            shapes[f"{prefix}{name}.weight"] = (size,)
    return shapes


class _Files:
    """The tensors of a checkpoint folder: one file, or shards with an index. Opens files without reading tensors."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        if index.exists():
            names = _shards(index)
        elif single.exists():
            names = {single.name}
        else:
            raise ModelError(
                f"{folder} holds neither {single.name} nor {index.name}; other weight formats are not read"
            )
        self._by_tensor: dict[str, Any] = {}
        for name in sorted(names):
            opened: Any = safe_open(folder / name, framework="pt")
            self._by_tensor.update(dict.fromkeys(opened.keys(), opened))

    @property
    def tensors(self) -> set[str]:
        return set(self._by_tensor)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._by_tensor[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the stored type. Raises ModelError if it is none of `DTYPES`."""
        stored = self._by_tensor[name].get_slice(name).get_dtype()
        if stored not in _STORED:
            raise ModelError(f"tensor {name} is stored as {stored}; supported: {', '.join(_STORED)}")
        return _STORED[stored]

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._by_tensor[name].get_tensor(name)
        return tensor


def _shards(index: Path) -> set[str]:
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ModelError(f"{index} must hold an object weight_map of tensor name to file name") from None
    if not all(isinstance(name, str) and Path(name).name == name for name in files):
        raise ModelError(f"{index}: weight_map must name files of the same folder")
    return files


def _check(files: _Files, expected: Shapes, tied: bool) -> None:
    present = {name for name in files.tensors if not _is_harmless(name, tied)}
    if missing := expected.keys() - present:
        raise ModelError(f"the checkpoint lacks {_named(missing)}")
    if unexpected := present - expected.keys():
        raise ModelError(f"the checkpoint holds {_named(unexpected)}, which config.json does not call for")
    for name, shape in expected.items():
        if (found := files.shape(name)) != shape:
            raise ModelError(f"tensor {name} has shape {list(found)}; config.json calls for {list(shape)}")
        files.dtype(name)


def _is_harmless(name: str, tied: bool) -> bool:
    """Return whether the tensor is a rotary buffer that older libraries stored, or a copy of a tied embedding."""
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def _named(tensors: set[str]) -> str:
    listed = sorted(tensors)
    more = f" and {len(listed) - _NAMES_SHOWN} more" if len(listed) > _NAMES_SHOWN else ""
    return f"tensor{'s' if len(listed) > 1 else ''} {', '.join(listed[:_NAMES_SHOWN])}{more}"


@dataclass(frozen=True, slots=True)
class _Loader:
    files: _Files
    shapes: Shapes
    dtype: torch.dtype
    device: torch.device
    head_dim: int

    def fused(self, names: Sequence[str]) -> Tensor | None:
        """Return these tensors stacked along the rows; None if the model has none of them."""
        names = [name for name in names if name in self.shapes]
        if not names:
            return None
        rows = sum(self.shapes[name][0] for name in names)
        out = torch.empty((rows, *self.shapes[names[0]][1:]), dtype=self.dtype, device=self.device)
        start = 0
        for name in names:
            end = start + self.shapes[name][0]
            tensor = self.files.read(name)
            out[start:end].copy_(interleaved(tensor, self.head_dim) if name.split(".")[-2] in _ROTATED else tensor)
            start = end
        return out

    def required(self, *names: str) -> Tensor:
        tensor = self.fused(names)
        assert tensor is not None, names
        return tensor

    def projection(self, *modules: str) -> Projection:
        """Return the modules' weights as one matrix, with their biases if they have any."""
        weight = self.required(*(f"{module}.weight" for module in modules))
        return Projection(weight, self.fused([f"{module}.bias" for module in modules]))


def _assemble(load: _Loader, config: ModelConfig) -> ModelWeights:
    embedding = load.required("model.embed_tokens.weight")
    return ModelWeights(
        embedding=embedding,
        layers=tuple(_layer(load, f"model.layers.{i}", config) for i in range(config.layers)),
        norm=load.required("model.norm.weight"),
        head=Projection(embedding, shared=True) if config.tied else load.projection("lm_head"),
    )


def _layer(load: _Loader, prefix: str, config: ModelConfig) -> LayerWeights:
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    q_norms, k_norms = [f"{attention}.q_norm.weight"] * config.heads, [f"{attention}.k_norm.weight"] * config.kv_heads
    qk_norm = load.fused(q_norms + k_norms)
    return LayerWeights(
        input_norm=load.required(f"{prefix}.input_layernorm.weight"),
        qkv=load.projection(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
        qk_norm=None if qk_norm is None else qk_norm.view(-1, config.head_dim),
        output=load.projection(f"{attention}.o_proj"),
        mlp_norm=load.required(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=load.projection(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        down=load.projection(f"{mlp}.down_proj"),
    )
