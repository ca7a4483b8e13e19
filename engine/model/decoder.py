"""The decoder shared by Llama, Mistral, Qwen2 and Qwen3: plain functions over `ModelWeights`.

Tokens of all chunks of a step lie flattened in one axis T. How keys and values are kept and attended to is the
backend's: it passes an `Attention`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, silu

from engine.model.config import ModelConfig
from engine.model.errors import ModelError
from engine.model.rope import cos_sin, inverse_frequencies, rotate
from engine.model.weights import LayerWeights, ModelWeights, load_weights


class Attention(Protocol):
    """Attention of one step over the backend's KV pool."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads, dim], k and v [T, kv_heads, dim], already rotated -> [T, heads * dim].

        Stores k and v of the step's tokens, then attends causally within each sequence, in the layer's window.
        """


class Decoder:
    """A loaded model. Holds no state of any sequence; call it under `torch.inference_mode()`."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self._frequencies = inverse_frequencies(config.rope, config.head_dim).to(self.device)

    def hidden(self, tokens: Tensor, positions: Tensor, attention: Attention, rows: Tensor) -> Tensor:
        """tokens and positions [T], rows [R] indexes into T -> normalised hidden states [R, hidden_size].

        Only `rows` pass the last layer's output projection and MLP: no other row is read after its attention.
        """
        config, layers = self.config, self.weights.layers
        x = embedding(tokens, self.weights.embedding)
        cos, sin = cos_sin(positions, self._frequencies, config.rope.attention_factor, self.dtype)
        for i, layer in enumerate(layers):
            attended = attention(i, *self._qkv(layer, x, cos, sin))
            if i == len(layers) - 1:
                x, attended = x[rows], attended[rows]
            x = x + layer.output(attended)
            x += self._mlp(layer, x)
        return rms_norm(x, self.weights.norm, config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden_size] -> [R, vocab_size]."""
        return self.weights.head(hidden)

    def _qkv(self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        fused = layer.qkv(rms_norm(x, layer.input_norm, config.rms_norm_eps))
        heads = fused.view(x.shape[0], -1, config.head_dim)
        qk, v = heads[:, : -config.kv_heads], heads[:, -config.kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k, eps = qk[:, : config.heads], qk[:, config.heads :], config.rms_norm_eps
            qk = torch.cat((rms_norm(q, layer.q_norm, eps), rms_norm(k, layer.k_norm, eps)), dim=1)
        qk = rotate(qk, cos, sin)
        return qk[:, : config.heads], qk[:, config.heads :], v

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        normed = rms_norm(x, layer.mlp_norm, self.config.rms_norm_eps)
        gate, up = layer.gate_up(normed).chunk(2, dim=-1)
        return layer.down(silu(gate).mul_(up))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n] scaled to a root mean square of 1 in float32, then by `weight` [n] (arXiv 1910.07467)."""
    wide = x.float()
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    normed: Tensor = (wide * scale).to(x.dtype).mul_(weight)
    return normed


def load_decoder(path: Path | str, *, dtype: str = "auto", device: str = "cpu") -> Decoder:
    """The checkpoint in folder `path`, on `device` ("cpu", "cuda" or "cuda:N"). Blocks while it reads.

    `dtype`: "auto" (the checkpoint's), "float32", "float16" or "bfloat16". Raises ModelError naming what is
    unsupported, missing or unreadable, and a CUDA device that is not there.
    """
    _check_device(device)
    folder = Path(path)
    config = ModelConfig.from_path(folder)
    return Decoder(config, load_weights(folder, config, dtype=dtype, device=device))


def _check_device(device: str) -> None:
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
        raise ModelError(f"device {device!r} is not supported; supported: cpu, cuda, cuda:N")
    if kind == "cuda" and int(index or 0) >= (torch.cuda.device_count() if torch.cuda.is_available() else 0):
        raise ModelError(f"device {device!r} is not there: torch sees no such CUDA device on this machine; try cpu")
