"""The gated activation of the MLP: silu(gate) * up, from the fused projection's output."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.backend.cuda.kernels.early import early, follow

_TILE = 1024
_WARPS = 4
"""8 elements per thread: one load of 16 bytes in a 16-bit type."""


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """gate_up [T, 2 I]: gates, then ups -> out [T, I]. silu(gate) is rounded to the tensors' type, as torch does."""
    rows, columns = out.shape
    _silu_mul[(rows, triton.cdiv(columns, _TILE))](
        gate_up, out, COLUMNS=columns, TILE=_TILE, num_warps=_WARPS, enable_fp_fusion=False, **early(out.device)
    )


@triton.jit
def _silu_mul(gate_up, out, COLUMNS: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr):
    follow(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < COLUMNS
    gates = gate_up + row * (2 * COLUMNS) + columns
    gate = tl.load(gates, mask=inside, other=0.0)
    up = tl.load(gates + COLUMNS, mask=inside, other=0.0)
    tl.store(out + row * COLUMNS + columns, gated(gate, up), mask=inside)


@triton.jit
def gated(gate, up):
    """Return silu(gate) * up, with silu and the product rounded to the type of gate."""
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
