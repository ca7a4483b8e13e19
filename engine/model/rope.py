"""Rotary position embedding (arXiv 2104.09864) with the scalings of `RopeConfig`, rotate-half layout."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.model.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions: [head_dim / 2] float32, in transformers' order of operations."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.variant == "linear":
        return plain / rope.factor
    if rope.variant == "llama3":
        return _llama3(plain, rope)
    if rope.variant == "yarn":
        return _yarn(rope, head_dim, exponents)
    return plain


def cos_sin(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """positions [T], frequencies [dim / 2] -> two [T, 1, dim / 2]; angles in float32, then `dtype`."""
    angles = positions[:, None, None].float() * frequencies
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, dim], cos and sin [T, 1, dim / 2] -> a new [T, heads, dim]: pair (i, i + dim / 2) turned."""
    first, second = x.chunk(2, dim=-1)
    out = torch.empty_like(x)
    half = first.shape[-1]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths slowed by `factor`, short ones kept, those between blended (Llama 3.1's reference code)."""
    wavelengths = 2 * math.pi / plain
    slow = plain / rope.factor
    blend = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    mixed = (1 - blend) * slow + blend * plain
    out = torch.where(wavelengths > rope.original_max_position / rope.low_freq_factor, slow, mixed)
    return torch.where(wavelengths < rope.original_max_position / rope.high_freq_factor, plain, out)


def _yarn(rope: RopeConfig, head_dim: int, exponents: Tensor) -> Tensor:
    """Below `beta_slow` turns per original context interpolated, above `beta_fast` kept (arXiv 2309.00071)."""

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
