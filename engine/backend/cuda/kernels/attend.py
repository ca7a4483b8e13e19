"""The code that paged prefill and paged decode share: one tile of keys, and the shape of a launch.

Rows never mix: a row's result depends on its query, its position and the tiles of keys. Tiles are cut at multiples of
their length; in decode with a window they are counted from the window's start. A tile that a row does not see does not
change the row's bits. Fused multiply-adds are explicit and the compiler may add none, so the masked and the plain
variant round alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
"""Softmax is computed in powers of two, which the hardware supports: exp(x) = exp2(x * LOG2_E)."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How one kernel is cut and run on one generation of cards."""

    rows: int
    """Rows of queries, (token, head), of one program; a power of two."""
    tile: int
    """Keys processed at a time; a power of two. The result's bits depend on it."""
    warps: int
    stages: int
    """Depth of the software pipeline; 1: no pipeline. Half of it, rounded down, is the number of tiles in flight,
    because a page's number is loaded before the page."""
    registers: int | None = None
    """The most registers of a thread. Without a bound the ptxas of Triton 3.7 spills a few bytes to fit one more
    program on a multiprocessor. With a bound it may spill in other cases."""


@dataclass(frozen=True, slots=True)
class PartSums:
    """Scratch for the sums of parts of sequences until they are added up; float32, reusable after each launch."""

    sums: Tensor
    """Sums of values, weighted relative to the part's peak: [..., dim]."""
    peaks: Tensor
    """Highest score in a part, in powers of two: [...]."""
    totals: Tensor
    """Sum of a part's weights: [...]."""

    @staticmethod
    def make(shape: tuple[int, ...], dim: int, device: torch.device) -> PartSums:
        """Return scratch for parts of `shape`, with heads of `dim`."""
        return PartSums(
            sums=torch.empty((*shape, dim), dtype=torch.float32, device=device),
            peaks=torch.empty(shape, dtype=torch.float32, device=device),
            totals=torch.empty(shape, dtype=torch.float32, device=device),
        )


INTERPRETED = Launch(rows=128, tile=64, warps=4, stages=1)
"""Settings for Triton's interpreter on a CPU: each program has a cost there, so programs are few and large. Warps and
stages have no effect."""


@cache
def is_hopper(_device: torch.device) -> bool:
    """Return whether settings for sm_90 apply on the current device, whose tensors are on `_device`. They apply to
    Hopper and the data-centre cards after it. Cards of compute capability 12 have as little shared memory as those of
    8.6, and no wgmma either. The result is cached per device, because every launch needs it."""
    return bool(90 <= triton.runtime.driver.active.get_current_target().arch < 120)


def columns_for(dim: int) -> int:
    """Return the columns of a tile for heads of `dim`: a power of two, at least the 16 that `tl.dot` needs."""
    return int(max(16, triton.next_power_of_2(dim)))


def multiplies_wide(values: Tensor) -> bool:
    """Return whether `tl.dot` needs float32 operands: Triton's interpreter multiplies the bit patterns of bfloat16.

    The products are the same, because products of two bfloat16 are exact in float32.
    """
    return values.device.type == "cpu" and values.dtype == torch.bfloat16


@triton.jit
def attend_tile(
    q,
    positions,
    acc,
    peak,
    total,
    keys,
    table,
    block_stride,
    start,
    first,
    end,
    window,
    scale,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Add the keys start .. start + TILE - 1 to the running softmax of the rows q; -> acc, peak, total.

    `keys` points at slot 0 of block 0 of this layer and head, `table` at the sequence's blocks. With MASKED only keys
    first .. end - 1 are loaded; otherwise the sequence must have the whole tile. A row sees the keys up to its position
    and within its window. `scale` converts scores to powers of two. acc [rows, padded dim] and total are relative to
    exp2(peak).
    """
    padded: tl.constexpr = q.shape[1]
    at = start + tl.arange(0, TILE)
    dims = tl.arange(0, padded)
    loaded = (at >= first) & (at < end)
    inside = dims < DIM
    blocks = tl.load(table + at // PAGE, mask=loaded, other=0) if MASKED else tl.load(table + at // PAGE)
    # 64 bits, because a pool of many GiB has more elements than 32 bits can count.
    offsets = blocks.to(tl.int64) * block_stride + (at % PAGE) * (KV_HEADS * DIM)
    key_at = keys + offsets[:, None] + dims[None, :]
    value_at = key_at + PAGE * KV_HEADS * DIM
    if MASKED:
        # Zeros instead of an unwritten slot's content: zero times NaN is NaN.
        k = tl.load(key_at, mask=loaded[:, None] & inside[None, :], other=0.0)
        v = tl.load(value_at, mask=loaded[:, None] & inside[None, :], other=0.0)
    elif padded != DIM:
        k = tl.load(key_at, mask=inside[None, :], other=0.0)
        v = tl.load(value_at, mask=inside[None, :], other=0.0)
    else:
        k = tl.load(key_at)
        v = tl.load(value_at)
    weight_type = v.dtype
    if WIDE:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        seen = at[None, :] <= positions[:, None]
        if WINDOWED:
            seen &= at[None, :] > positions[:, None] - window
        scores = tl.where(seen, scores, float("-inf"))
    # In powers of two from here on, so that a row whose peak stays is scaled by exactly 1.
    higher = tl.maximum(peak, tl.max(scores, 1) * scale)
    # A row that has seen no key yet has no peak; any finite level keeps its sums at zero.
    level = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(tl.fma(scores, scale, -level[:, None]))
    shrink = tl.exp2(peak - level)
    total = tl.fma(total, shrink, tl.sum(weights, 1))
    weights = weights.to(weight_type)
    if WIDE:
        weights = weights.to(tl.float32)
    acc = tl.dot(weights, v, acc * shrink[:, None], input_precision="ieee")
    return acc, higher, total
