"""Rotary position embedding (arXiv 2104.09864) with the scalings of `RopeConfig`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.model.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the radians per position of each pair of dimensions: [head_dim / 2] float32, as in transformers."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.variant == "linear":
        return plain / rope.factor
    if rope.variant == "llama3":
        return _llama3(plain, rope)
    if rope.variant == "yarn":
        return _yarn(rope, head_dim, exponents)
    return plain


def turns(positions: Tensor, frequencies: Tensor, scale: float) -> Tensor:
    """positions [T], frequencies [dim / 2] -> complex64 [T, 1, dim / 2] for `rotate_`."""
    angles = positions[:, None, None].float() * frequencies
    return torch.complex(angles.cos().mul_(scale), angles.sin().mul_(scale))


def interleaved(weight: Tensor, dim: int) -> Tensor:
    """[heads * dim, ...] in the checkpoint's order -> the same rows with the two rows of each rotated pair adjacent.

    Checkpoints rotate (i, i + dim / 2). If queries and keys are reordered alike, their products stay the same.
    """
    pairs = weight.view(-1, 2, dim // 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def rotate_(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate the `interleaved` pairs of x [T, heads, dim] in place, by one complex product in float32."""
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], x.shape[-1] // 2, 2)).mul_(turns)
    return x if x.dtype == torch.float32 else x.copy_(torch.view_as_real(pairs).flatten(-2))


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Slow down long wavelengths by `factor`, keep short ones, blend those between (Llama 3.1's reference code)."""
    wavelengths = 2 * math.pi / plain
    slow = plain / rope.factor
    blend = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    mixed = (1 - blend) * slow + blend * plain
    out = torch.where(wavelengths > rope.original_max_position / rope.low_freq_factor, slow, mixed)
    return torch.where(wavelengths < rope.original_max_position / rope.high_freq_factor, plain, out)


def _yarn(rope: RopeConfig, head_dim: int, exponents: Tensor) -> Tensor:
    """Interpolate below `beta_slow` turns per original context, keep above `beta_fast` (arXiv 2309.00071)."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    periods = rope.theta**exponents
    return (1.0 / (rope.factor * periods)) * ramp + (1.0 / periods) * (1 - ramp)
