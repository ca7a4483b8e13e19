"""RMS norm over the last axis, alone or fused with the residual sum before it: one program per row.

Rounding is that of `engine.model.decoder.rms_norm`: the mean in float32, the scaled row rounded to the tensors' type,
then the weight. The residual sum is rounded before its norm.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.backend.cuda.kernels.early import early, follow

_ELEMENTS_PER_WARP = 512
"""16 elements per thread: two loads of 16 bytes in a 16-bit type."""
_MOST_WARPS = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """x [T, n] and weight [n] -> out [T, n], which may be x."""
    _launch(x, None, weight, eps, out)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """residual += x, then out = norm(residual) * weight; all [T, n], weight [n]. `out` may be x."""
    _launch(x, residual, weight, eps, out)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    rows, columns = x.shape
    tile = triton.next_power_of_2(columns)
    _norm[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        eps,
        COLUMNS=columns,
        TILE=tile,
        ADDS=residual is not None,
        num_warps=min(max(tile // _ELEMENTS_PER_WARP, 1), _MOST_WARPS),
        enable_fp_fusion=False,
        **early(x.device),
    )


@triton.jit
def _norm(
    x,
    residual,
    weight,
    out,
    eps,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    ADDS: tl.constexpr,
    EARLY: tl.constexpr,
):
    follow(EARLY)
    start = tl.program_id(0).to(tl.int64) * COLUMNS
    columns = tl.arange(0, TILE)
    inside = columns < COLUMNS
    row = tl.load(x + start + columns, mask=inside, other=0.0)
    if ADDS:
        before = tl.load(residual + start + columns, mask=inside, other=0.0)
        row = (row.to(tl.float32) + before.to(tl.float32)).to(row.dtype)
        tl.store(residual + start + columns, row, mask=inside)
    wide = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / COLUMNS + eps)
    weights = tl.load(weight + columns, mask=inside, other=0.0)
    # The product of two 16-bit floats is exact in float32, so this rounds once, like a product in their type.
    normed = (wide * scale).to(row.dtype).to(tl.float32) * weights.to(tl.float32)
    tl.store(out + start + columns, normed.to(row.dtype), mask=inside)
