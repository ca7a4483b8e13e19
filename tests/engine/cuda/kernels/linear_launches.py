"""Launches of the products of few rows on the "meta" device, for `compiling.compiled`."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.backend.cuda.kernels.linear import gated_linear, linear


def llama_8b() -> None:
    """The products of a layer of Llama 3 8B, and its head."""
    for inputs, outputs in ((4096, 6144), (4096, 4096), (14336, 4096), (4096, 128_256)):
        linear(_meta(7, inputs), _meta(outputs, inputs), None, _meta(7, outputs))
    gated_linear(_meta(7, 4096), _meta(2 * 14336, 4096), _meta(7, 14336))


def more_rows() -> None:
    """Products with as many rows as the kernels accept. The engine uses the kernels only for fewer rows."""
    for rows in (32, 64):
        linear(_meta(rows, 4096), _meta(6144, 4096), None, _meta(rows, 6144))
        gated_linear(_meta(rows, 4096), _meta(2 * 14336, 4096), _meta(rows, 14336))


def odd() -> None:
    """Inputs and outputs that do not fill their tiles, and a bias: a small Qwen's QKV and MLP, and smaller products."""
    for inputs, outputs in ((896, 1152), (4864, 896), (50, 30)):
        linear(_meta(7, inputs), _meta(outputs, inputs), _meta(outputs), _meta(7, outputs))
        gated_linear(_meta(7, inputs), _meta(2 * outputs, inputs), _meta(7, outputs))


def _meta(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")
