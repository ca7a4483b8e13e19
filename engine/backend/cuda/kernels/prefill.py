"""Attention of prompt chunks to their sequences' pages, many chunks in one launch.

A tile is some neighbouring tokens of one chunk with all query heads that share one KV head, so that a key is loaded
once for the whole group. A program computes one, or a slice of one where registers want fewer rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.backend.cuda.kernels.attend import (
    INTERPRETED,
    LOG2_E,
    Launch,
    attend_tile,
    columns_for,
    is_hopper,
    multiplies_wide,
)
from engine.backend.cuda.kernels.early import early, follow
from engine.backend.cuda.step import PrefillTensors

ROWS = 128
"""Rows (token, query head) of a tile: two warp groups of 64, the least that a wgmma takes, share the keys in shared
memory. With half as many rows a Hopper card's matrix rate would ask for more keys per second than its L2 gives."""


def query_tile(heads: int, kv_heads: int) -> int:
    """Tokens per tile: what `PrefillTensors.tiles` counts in. Raises ValueError where the heads do not fit."""
    group, rest = divmod(heads, kv_heads)
    if rest or not 1 <= group <= ROWS:
        raise ValueError(f"{heads} query heads over {kv_heads} KV heads: want a multiple of at most {ROWS} times")
    return ROWS // group


def launch_for(dim: int, dtype: torch.dtype, device: torch.device) -> Launch:
    """Settings for heads of `dim`. They are fixed: tuning at run time would choose by timing, and other tiles of keys
    give other bits."""
    wide = dim > 128
    if dtype == torch.float32:
        # No tensor cores for it: every thread holds its operands in registers, which more rows would not fit.
        return Launch(rows=16, tile=32 if wide else 16, warps=4, stages=1)
    if is_hopper(device):
        # A product of 64 rows and 128 keys is as wide as wgmma needs to wait for tensor cores, not for shared memory.
        # Sums of 256 dimensions leave registers for 32 keys.
        return Launch(rows=ROWS, tile=32 if wide else 128, warps=8, stages=3)
    # Ampere multiplies from registers: queries are there besides the sums, so half as many keys, or rows.
    return Launch(rows=64 if wide else ROWS, tile=32 if wide else 64, warps=8, stages=3)


def paged_prefill(
    q: Tensor,
    pool: Tensor,
    layer: int,
    out: Tensor,
    tensors: PrefillTensors,
    *,
    window: int | None,
    scale: float,
) -> None:
    """Write the attention of q [T, heads, dim] to `out` [T, heads * dim], rows that no tile names untouched.

    `pool` [block, layer, 2, slot, kv_head, dim] holds the chunks' own keys and values already. Rows of q and out may be
    apart, elements of a row not. A row's bits depend on its sequence and position alone: not on other chunks, and not
    on where the chunk begins.
    """
    _, heads, dim = q.shape
    page, kv_heads = pool.shape[3], pool.shape[4]
    launch = INTERPRETED if q.device.type == "cpu" else launch_for(dim, q.dtype, q.device)
    _prefill[(tensors.tiles.shape[0] * (ROWS // launch.rows), kv_heads)](
        q,
        q.stride(0),
        pool[:, layer],
        pool.stride(0),
        tensors.tables,
        tensors.tables.stride(0),
        tensors.query_starts,
        tensors.contexts,
        tensors.tiles,
        out,
        out.stride(0),
        window or 0,
        scale * LOG2_E,
        TOKENS=query_tile(heads, kv_heads),
        GROUP=heads // kv_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        PADDED=columns_for(dim),
        PAGE=page,
        ROWS=launch.rows,
        SLICES=ROWS // launch.rows,
        TILE=launch.tile,
        WINDOWED=window is not None,
        WIDE=multiplies_wide(q),
        num_warps=launch.warps,
        num_stages=launch.stages,
        enable_fp_fusion=False,
        **early(q.device),
    )


@triton.jit(do_not_specialize=["table_stride", "window"])
def _prefill(
    q,
    q_stride,
    keys,
    block_stride,
    tables,
    table_stride,
    query_starts,
    contexts,
    tiles,
    out,
    out_stride,
    window,
    scale,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    SLICES: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    follow(EARLY)
    # The last tiles of a chunk see most keys: they go first, so that the short ones fill the end of the launch.
    # All tiles of a head come before the next head's: neighbours share their keys in L2.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = program // SLICES
    head = tl.program_id(1)
    sequence = tl.load(tiles + 2 * tile)
    if sequence < 0:
        return
    tile_start = tl.load(tiles + 2 * tile + 1) * TOKENS
    begin = tl.load(query_starts + sequence)
    tile_end = tl.minimum(tile_start + TOKENS, tl.load(query_starts + sequence + 1) - begin)
    first_row = program % SLICES * ROWS
    first_token = tile_start + first_row // GROUP
    last_token = tl.minimum(tile_start + (first_row + ROWS - 1) // GROUP, tile_end - 1)
    if first_token > last_token:
        return
    context = tl.load(contexts + sequence)

    rows = first_row + tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED)
    tokens = tile_start + rows // GROUP
    written = (tokens < tile_end)[:, None] & (dims < DIM)[None, :]
    columns = (head * GROUP + rows % GROUP)[:, None] * DIM + dims[None, :]
    at = (begin + tokens).to(tl.int64)[:, None]
    queries = tl.load(q + at * q_stride + columns, mask=written, other=0.0)
    if WIDE:
        queries = queries.to(tl.float32)

    positions = context + tokens
    end = context + last_token + 1
    lowest = context + first_token
    acc = tl.zeros([ROWS, PADDED], dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    peak = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    keys += head * DIM
    table = tables + sequence.to(tl.int64) * table_stride
    first = 0
    if WINDOWED:
        first = tl.maximum(lowest - window + 1, 0)
        masked_start = first // TILE * TILE
    else:
        masked_start = (lowest + 1) // TILE * TILE
        for start in range(0, masked_start, TILE):
            acc, peak, total = attend_tile(
                queries, positions, acc, peak, total, keys, table, block_stride, start, first, end, window, scale,
                KV_HEADS, DIM, PAGE, TILE, False, WINDOWED, WIDE,
            )  # fmt: skip
    for start in range(masked_start, end, TILE):
        acc, peak, total = attend_tile(
            queries, positions, acc, peak, total, keys, table, block_stride, start, first, end, window, scale,
            KV_HEADS, DIM, PAGE, TILE, True, WINDOWED, WIDE,
        )  # fmt: skip
    # Rows beyond the chunk may have seen nothing.
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + at * out_stride + columns, acc.to(out.dtype.element_ty), mask=written)
