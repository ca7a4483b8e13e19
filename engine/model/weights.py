"""Loads a checkpoint's safetensors: checks every name and shape first, then reads one tensor at a time.

Peak memory is the model plus one fused matrix: its parts are copied into place as they are read, then it may be packed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.model.config import DTYPES, ModelConfig
from engine.model.errors import ModelError
from engine.model.projection import Projection
from engine.model.rope import interleaved

log = logging.getLogger(__name__)
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
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

    @property
    def is_tied(self) -> bool:
        """Whether the output projection is the input embedding."""
        return self.head.plain is not None and self.head.plain[0] is self.embedding


Shapes = dict[str, tuple[int, ...]]


def load_weights(folder: Path, config: ModelConfig, *, dtype: str = "auto", device: str = "cpu") -> ModelWeights:
    """Load the weights onto `device`. `dtype` is one of `DTYPES`, or "auto": the checkpoint's.

    If config.json ties the output projection to the embedding, but the checkpoint holds two different matrices, both
    are used; if it holds only one of them, that one serves as both. transformers does the same (`tie_weights`).
    Raises ModelError naming a missing, unexpected, wrongly shaped or unsupported tensor, or an unreadable file.
    """
    if dtype not in ("auto", *DTYPES):
        raise ModelError(f"dtype {dtype!r} is not supported; supported: auto, {', '.join(DTYPES)}")
    files = _Files(folder)
    if config.tied and _HEAD in files.tensors:
        config = _untied_if_different(files, config)
    expected = tensor_shapes(config)
    _check(files, expected, config.tied)
    name = (config.dtype or files.dtype(_EMBEDDING)) if dtype == "auto" else dtype
    return _assemble(_Loader(files, expected, getattr(torch, name), torch.device(device), config.head_dim), config)


def _untied_if_different(files: _Files, config: ModelConfig) -> ModelConfig:
    """Return the config, untied if the checkpoint's own output projection differs from its embedding."""
    if _EMBEDDING not in files.tensors:
        files.rename(_HEAD, _EMBEDDING)
        return config
    head, embedding = files.read(_HEAD), files.read(_EMBEDDING)
    if head.dtype == embedding.dtype and torch.equal(head, embedding):
        return config
    log.warning(
        "config.json ties %s to %s (tie_word_embeddings), but the checkpoint holds both and they differ: both are used",
        _HEAD,
        _EMBEDDING,
    )
    return replace(config, tied=False)


def tensor_shapes(config: ModelConfig) -> Shapes:
    """Return name -> shape of every tensor that a checkpoint of `config` must hold."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    shapes: Shapes = {_EMBEDDING: (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tied:
        shapes[_HEAD] = (config.vocab_size, hidden)
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
    """The tensors of a checkpoint folder: one file, or shards with an index. Opens files without reading tensors.

    Every method raises ModelError with the file's path if a file is missing, cut short or broken.
    """

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        weight_map: dict[str, str] = {}
        if single.exists():
            if index.exists():
                log.warning("%s is read, and the shards of %s beside it are not", single.name, index.name)
        elif index.exists():
            weight_map = _weight_map(index)
        else:
            raise ModelError(
                f"{folder} holds neither {single.name} nor {index.name}; other weight formats are not read"
            )
        self._by_tensor: dict[str, _File] = {}
        for name in sorted(set(weight_map.values())) or [single.name]:
            file = _File.open(folder / name)
            # A tensor that lies in several shards is read from the one that the index names.
            held = (tensor for tensor in file.tensors if weight_map.get(tensor, name) == name)
            self._by_tensor.update(dict.fromkeys(held, file))
        for tensor, name in weight_map.items():
            if tensor not in self._by_tensor:
                raise ModelError(f"{folder / name} lacks tensor {tensor}, which {index.name} says is there")

    @property
    def tensors(self) -> set[str]:
        return set(self._by_tensor)

    def rename(self, name: str, new: str) -> None:
        """Find the tensor `name` under the name `new` from now on."""
        self._by_tensor[new] = self._by_tensor.pop(name).renamed(name, new)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._by_tensor[name].shape(name)

    def dtype(self, name: str) -> str:
        """Return the stored type. Raises ModelError if it is none of `DTYPES`."""
        stored = self._by_tensor[name].dtype(name)
        if stored not in _STORED:
            raise ModelError(f"tensor {name} is stored as {stored}; supported: {', '.join(_STORED)}")
        return _STORED[stored]

    def read(self, name: str) -> Tensor:
        return self._by_tensor[name].read(name)


@dataclass(frozen=True, slots=True)
class _File:
    """An open file of tensors."""

    path: Path
    opened: Any
    stored_names: Mapping[str, str]
    """The name in the file by the name in use."""

    @staticmethod
    def open(path: Path) -> _File:
        with _naming(path):
            opened: Any = safe_open(path, framework="pt")
            return _File(path, opened, dict(zip(names := opened.keys(), names, strict=True)))

    @property
    def tensors(self) -> Iterable[str]:
        return self.stored_names

    def renamed(self, name: str, new: str) -> _File:
        return replace(self, stored_names={new: self.stored_names[name]})

    def shape(self, name: str) -> tuple[int, ...]:
        with _naming(self.path):
            return tuple(self.opened.get_slice(self.stored_names[name]).get_shape())

    def dtype(self, name: str) -> str:
        with _naming(self.path):
            return str(self.opened.get_slice(self.stored_names[name]).get_dtype())

    def read(self, name: str) -> Tensor:
        with _naming(self.path):
            tensor: Tensor = self.opened.get_tensor(self.stored_names[name])
        return tensor


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raise ModelError with the file's path instead of the library's errors, most of which name no file."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ModelError(f"{path} cannot be read: {reason}") from None


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file name of each tensor. Raises ModelError."""
    try:
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = set(named.values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise ModelError(f"{index} must hold an object weight_map of tensor name to file name") from None
    if not files or not all(isinstance(name, str) and Path(name).name == name for name in files):
        raise ModelError(f"{index}: weight_map must name files of the same folder")
    return dict(named)


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
    return name.endswith("rotary_emb.inv_freq") or (tied and name == _HEAD)


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
    embedding = load.required(_EMBEDDING)
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
