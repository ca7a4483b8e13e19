"""The decoder shared by Llama, Mistral, Qwen2 and Qwen3: plain functions over `ModelWeights`.

Tokens of all chunks of a step lie flattened in one axis T. The backend passes an `Attention`, which stores keys and
values and attends to them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, silu

from engine.model.config import ModelConfig
from engine.model.errors import ModelError
from engine.model.rope import inverse_frequencies, rotate_, turns
from engine.model.weights import LayerWeights, ModelWeights, load_weights


class Attention(Protocol):
    """Attention of one step over the backend's KV pool."""

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """q [T, heads, dim], kv [T, 2, kv_heads, dim] (keys, values), already rotated -> [T, heads * dim].

        Stores kv of the step's tokens, then attends causally within each sequence, in the layer's window.
        """


class Decoder:
    """A loaded model. Holds no state of any sequence; call it under `torch.inference_mode()`."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self._eps = torch.tensor(config.rms_norm_eps, device=self.device)
        self._frequencies = inverse_frequencies(config.rope, config.head_dim).to(self.device)

    def hidden(self, tokens: Tensor, positions: Tensor, attention: Attention, rows: Tensor | None) -> Tensor:
        """tokens and positions [T], rows [R] indexes into T -> normalised hidden states [R, hidden_size].

        `rows` None: all rows. Only `rows` pass the last layer's output projection and MLP: no other row is read
        after the last attention.
        """
        layers = self.weights.layers
        x = embedding(tokens, self.weights.embedding)
        rotation = self._rotation(positions)
        for i, layer in enumerate(layers):
            attended = attention(i, *self._qkv(layer, x, rotation))
            if rows is not None and i == len(layers) - 1:
                x, attended = x[rows], attended[rows]
            x = x + layer.output(attended)
            x += self._mlp(layer, x)
        return self._norm(x, self.weights.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden_size] -> [R, vocab_size]."""
        return self.weights.head(hidden)

    def _qkv(self, layer: LayerWeights, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        fused = layer.qkv(self._norm(x, layer.input_norm))
        heads = fused.view(len(x), config.heads + 2 * config.kv_heads, config.head_dim)
        qk = heads[:, : -config.kv_heads]
        if layer.qk_norm is not None:
            qk.copy_(self._norm(qk, layer.qk_norm))
        self._rotate(qk, rotation)
        return heads[:, : config.heads], heads[:, config.heads :].view(len(x), 2, config.kv_heads, config.head_dim)

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        normed = self._norm(x, layer.mlp_norm)
        gate, up = layer.gate_up(normed).view(len(x), 2, self.config.intermediate_size).unbind(1)
        return layer.down(self._activate(gate, up))

    def _rotation(self, positions: Tensor) -> Tensor:
        return turns(positions, self._frequencies, self.config.rope.attention_factor)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._eps)

    def _rotate(self, qk: Tensor, rotation: Tensor) -> None:
        rotate_(qk, rotation)

    def _activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return silu(gate).mul_(up)


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """Scale x [..., n] to a root mean square of 1 in float32, then by `weight` [..., n] (arXiv 1910.07467).

    `eps`: a float32 scalar. It is a tensor, so that one operation squares the norm and adds `eps`.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
    normed: Tensor = (x * scale).to(x.dtype).mul_(weight)
    return normed


def load_decoder(path: Path | str, *, dtype: str = "auto", device: str = "cpu") -> Decoder:
    """Load the checkpoint in folder `path` onto `device` ("cpu", "cuda" or "cuda:N"). Blocks while it reads.

    `dtype`: "auto" (the checkpoint's), "float32", "float16" or "bfloat16". Raises ModelError naming an unsupported,
    missing or unreadable part, or a CUDA device that does not exist.
    """
    _check_device(device)
    folder = Path(path)
    config = ModelConfig.from_path(folder)
    weights = load_weights(folder, config, dtype=dtype, device=device)
    return Decoder(replace(config, tied=weights.is_tied), weights)


def _check_device(device: str) -> None:
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
        raise ModelError(f"device {device!r} is not supported; supported: cpu, cuda, cuda:N")
    if kind == "cuda" and int(index or 0) >= (torch.cuda.device_count() if torch.cuda.is_available() else 0):
        raise ModelError(f"device {device!r} does not exist: torch sees no such CUDA device on this machine; try cpu")
