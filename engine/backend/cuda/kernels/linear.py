"""Matrix products of up to 64 rows, as in a decode step of a few sequences: all the work is reading the weights once.

cuBLAS cuts such products for its tensor cores. Here a program reads some rows of the weights from end to end. With
programmatic dependent launch it begins before its input is ready, because the weights do not depend on the input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.backend.cuda.kernels.activation import gated
from engine.backend.cuda.kernels.attend import is_hopper, multiplies_wide
from engine.backend.cuda.kernels.early import early, follow

LEAST_ROWS, MOST_ROWS = 16, 64
"""The fewest and the most rows of the one tile that holds all of x. A product on tensor cores takes 16 rows anyway."""
FEW_ROWS = 16
"""Rows up to which the engine uses these kernels. cuBLAS should be as good beyond that; `make gpu-bench` times both."""
_LINE = 128
"""Bytes of a line of the L2 cache."""
LINES_AHEAD = 8
"""Lines of each row of weights that are prefetched before the input is ready. With the 128 programs of a product of
4,096 columns that is 4 MiB, which a card of 4.8 TB/s reads while the previous kernel ends."""


@dataclass(frozen=True, slots=True)
class ProductLaunch:
    """How a product is cut and run on one generation of cards."""

    tile: int
    """Outputs of a program. With 32, a product with 4,096 outputs occupies nearly all multiprocessors of an H200."""
    depth: int
    """Inputs processed at a time: 256 bytes of each row."""
    stages: int
    """Depth of the pipeline, for some 50 KiB of weights in flight per program: bandwidth times latency is 40 KiB per
    multiprocessor."""
    warps: int = 4


INTERPRETED = ProductLaunch(tile=64, depth=256, stages=1)


def launch_for(device: torch.device, rows: int, *, is_gated: bool) -> ProductLaunch:
    """Return the settings for a tile of `rows`; `is_gated`: for the product with gate, up and SiLU. The settings are
    fixed, like those of attention."""
    if device.type == "cpu":
        return INTERPRETED
    tile = 32 if rows == LEAST_ROWS else 64  # larger for more rows, because every program reads all of x from L2
    if is_hopper(device):
        stages = {16: 5, 32: 4, 64: 3} if is_gated else {16: 8, 32: 5, 64: 4}
    else:
        stages = {16: 4, 32: 3, 64: 2} if is_gated else {16: 6, 32: 4, 64: 3}
    return ProductLaunch(tile=tile, depth=128, stages=stages[rows])


def suits(x: Tensor, weight: Tensor) -> bool:
    """Return whether these kernels suit the product: few rows of a 16-bit type. float32 has no tensor cores here."""
    return len(x) <= FEW_ROWS and x.dtype.itemsize == 2 and weight.is_contiguous() and x.is_contiguous()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """x [T, in] times weight [out, in] transposed, plus bias [out], rounded once -> out [T, out]; T up to `MOST_ROWS`.

    A row's bits do not depend on the other rows. They depend only on whether up to 16, 32 or 64 rows are computed.
    """
    _launch(x, weight, bias, out, is_gated=False)


def gated_linear(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """x [T, in], weight [2 I, in], gates before ups -> out [T, I]: `silu_mul` of the product; T up to `MOST_ROWS`."""
    _launch(x, weight, None, out, is_gated=True)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, is_gated: bool) -> None:
    rows, columns = out.shape
    tile_rows = max(LEAST_ROWS, triton.next_power_of_2(rows))
    launch = launch_for(x.device, tile_rows, is_gated=is_gated)
    _linear[(triton.cdiv(columns, launch.tile),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        IN=x.shape[1],
        OUT=columns,
        GATED=is_gated,
        BIASED=bias is not None,
        ROWS=tile_rows,
        TILE=launch.tile,
        DEPTH=launch.depth,
        LINES=LINES_AHEAD,
        LINE=_LINE // weight.itemsize,
        WIDE=multiplies_wide(x),
        num_warps=launch.warps,
        num_stages=launch.stages,
        enable_fp_fusion=False,
        **early(x.device),
    )


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x,
    weight,
    bias,
    out,
    rows,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    LINES: tl.constexpr,
    LINE: tl.constexpr,
    WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    first = tl.program_id(0) * TILE
    if EARLY:
        _ask_for(weight, first, IN, OUT, TILE, LINES, LINE)
        if GATED:
            _ask_for(weight + OUT * IN, first, IN, OUT, TILE, LINES, LINE)
    follow(EARLY)
    columns = first + tl.arange(0, TILE)
    row = tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    # 64 bits, because the head of a large model has nearly as many elements as 31 bits can count.
    weights = weight + columns.to(tl.int64)[:, None] * IN + depth[None, :]
    inputs = x + row[:, None] * IN + depth[None, :]
    acc = tl.zeros([ROWS, TILE], dtype=tl.float32)
    ups = tl.zeros([ROWS, TILE], dtype=tl.float32)
    for start in range(0, IN, DEPTH):
        inside = (start + depth < IN)[None, :] if IN % DEPTH else (depth < DEPTH)[None, :]
        given = tl.load(inputs + start, mask=(row < rows)[:, None] & inside, other=0.0)
        if WIDE:
            given = given.to(tl.float32)
        acc = _add_product(given, weights + start, columns, inside, acc, IN, OUT, TILE, DEPTH, WIDE)
        if GATED:
            ups = _add_product(given, weights + OUT * IN + start, columns, inside, ups, IN, OUT, TILE, DEPTH, WIDE)
    if BIASED:
        acc += tl.load(bias + columns, mask=columns < OUT, other=0.0).to(tl.float32)[None, :]
    result = acc.to(out.dtype.element_ty)
    if GATED:
        result = gated(result, ups.to(out.dtype.element_ty))
    written = (row < rows)[:, None] & (columns < OUT)[None, :]
    tl.store(out + row[:, None] * OUT + columns[None, :], result, mask=written)


@triton.jit
def _add_product(
    given,
    weights,
    columns,
    inside,
    acc,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDE: tl.constexpr,
):
    if IN % DEPTH or OUT % TILE:
        read = tl.load(weights, mask=(columns < OUT)[:, None] & inside, other=0.0)
    else:
        read = tl.load(weights)
    if WIDE:
        read = read.to(tl.float32)
    return tl.dot(given, tl.trans(read), acc, input_precision="ieee")


@triton.jit
def _ask_for(
    weight, first, IN: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr
):
    """Prefetch the first lines of TILE rows into L2. If a line does not exist, prefetch the first row's first line."""
    at = tl.arange(0, TILE * LINES)
    row, start = first + at // LINES, at % LINES * LINE
    offset = tl.where((row < OUT) & (start < IN), row.to(tl.int64) * IN + start, 0)
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [weight + offset], dtype=tl.int32, is_pure=False, pack=1
    )
