"""Attention of prompt chunks to their sequences' pages, many chunks in one launch.

A tile is some neighbouring tokens of one chunk with all query heads that share one KV head, so that a key is loaded
once for the whole group. A program computes one tile, or a slice of a tile if registers limit the rows. In a short
chunk with many keys a program computes only a part of the keys, and a second kernel adds the parts up (`tiling.py`).
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
    PartSums,
    attend_tile,
    columns_for,
    is_hopper,
    multiplies_wide,
)
from engine.backend.cuda.kernels.early import early, follow
from engine.backend.cuda.kernels.step import PrefillTensors
from engine.backend.cuda.kernels.tiling import Tiling

ROWS = 128
"""Rows (token, query head) of a tile: two warp groups of 64, the least that a wgmma takes, share the keys in shared
memory. With half as many rows a Hopper card's matrix rate would need more keys per second than its L2 delivers."""
ADDED_ROWS = 16
"""Rows of a tile that one program adds up: few, because a short chunk has few tiles."""
_WITHOUT_CARD = 132
"""Multiprocessors assumed without a card, where speed does not matter: as many as an H200 has."""


def tiling_for(heads: int, kv_heads: int, device: torch.device) -> Tiling:
    """Return the cut for these heads on this card. Raises ValueError if the heads do not fit."""
    processors = _WITHOUT_CARD
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Tiling(query_tile(heads, kv_heads), kv_heads, processors)


def prefill_scratch(tiling: Tiling, dim: int, device: torch.device) -> PartSums:
    """Return scratch for the parts of `tiling`, with heads of `dim`: [slots, kv_heads, ROWS]."""
    return PartSums.make((tiling.slots, tiling.kv_heads, ROWS), dim, device)


def query_tile(heads: int, kv_heads: int) -> int:
    """Return the tokens per tile. Raises ValueError if the heads do not fit."""
    group, rest = divmod(heads, kv_heads)
    if rest or not 1 <= group <= ROWS:
        raise ValueError(f"{heads} query heads over {kv_heads} KV heads: the ratio must be a whole number up to {ROWS}")
    return ROWS // group


def launch_for(dim: int, dtype: torch.dtype, device: torch.device, *, windowed: bool) -> Launch:
    """Return the settings for heads of `dim`, with or without a window of attention. They are fixed: tuning at run time
    would choose by timing, and other tiles of keys give other bits."""
    wide = dim > 128
    if dtype == torch.float32:
        # Without tensor cores every thread holds its operands in registers, which limits the rows.
        return Launch(rows=16, tile=32 if wide else 16, warps=4, stages=1, registers=255)
    if is_hopper(device):
        # With 64 rows and 128 keys a wgmma waits for tensor cores, not for shared memory.
        # Sums of 256 dimensions leave registers for only 32 keys.
        return Launch(rows=ROWS, tile=32 if wide else 128, warps=8, stages=3)
    # Ampere multiplies from registers, which hold queries and sums, so there are half as many keys, or rows. With the
    # two masks of a window Triton 3.7 spills registers unless a page's number is read just before the page.
    return Launch(rows=64 if wide else ROWS, tile=32 if wide else 64, warps=8, stages=2 if windowed and not wide else 3)


def paged_prefill(
    q: Tensor,
    pool: Tensor,
    layer: int,
    out: Tensor,
    tensors: PrefillTensors,
    scratch: PartSums,
    *,
    window: int | None,
    scale: float,
) -> None:
    """Write the attention of q [T, heads, dim] to `out` [T, heads * dim]. Rows in no tile are not touched.

    `pool` [block, layer, 2, slot, kv_head, dim] already holds the chunks' own keys and values. q and out must be
    contiguous within a row. A row's bits depend on its sequence and position and, if its chunk is cut along the keys,
    on the chunk's length. They do not depend on other chunks.
    """
    _, heads, dim = q.shape
    page, kv_heads = pool.shape[3], pool.shape[4]
    launch = INTERPRETED if q.device.type == "cpu" else launch_for(dim, q.dtype, q.device, windowed=window is not None)
    columns = columns_for(dim)
    tile = {"TOKENS": query_tile(heads, kv_heads), "GROUP": heads // kv_heads, "KV_HEADS": kv_heads, "TILE_ROWS": ROWS}
    slices = ROWS // launch.rows
    for first, last, first_merged, last_merged in tensors.rounds:
        parted = last_merged > first_merged
        _prefill[((last - first) * slices, kv_heads)](
            q,
            q.stride(0),
            pool[:, layer],
            pool.stride(0),
            tensors.tables,
            tensors.tables.stride(0),
            tensors.query_starts,
            tensors.contexts,
            tensors.tiles,
            first,
            scratch.sums,
            scratch.peaks,
            scratch.totals,
            out,
            out.stride(0),
            window or 0,
            scale * LOG2_E,
            **tile,
            DIM=dim,
            PADDED=columns,
            PAGE=page,
            ROWS=launch.rows,
            SLICES=slices,
            TILE=launch.tile,
            WINDOWED=window is not None,
            PARTED=parted,
            WIDE=multiplies_wide(q),
            num_warps=launch.warps,
            maxnreg=launch.registers,
            num_stages=launch.stages,
            enable_fp_fusion=False,
            **early(q.device),
        )
        if parted:
            _add_tile_parts[(ROWS // ADDED_ROWS, kv_heads, last_merged - first_merged)](
                tensors.query_starts,
                tensors.tiles,
                tensors.merged,
                first_merged,
                scratch.sums,
                scratch.peaks,
                scratch.totals,
                out,
                out.stride(0),
                **tile,
                DIM=dim,
                PADDED=columns,
                ROWS=ADDED_ROWS,
                num_warps=4,
                enable_fp_fusion=False,
                **early(q.device),
            )


@triton.jit(do_not_specialize=["table_stride", "first_tile", "window"])
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
    first_tile,
    sums,
    peaks,
    totals,
    out,
    out_stride,
    window,
    scale,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    SLICES: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    PARTED: tl.constexpr,
    WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    follow(EARLY)
    # The last tiles of a chunk see the most keys. They go first, so that the short ones fill the end of the launch.
    # All tiles of a head come before the next head's, so that neighbours share their keys in L2.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    entry = tiles + 5 * (first_tile + program // SLICES)
    sequence = tl.load(entry)
    tile_start = tl.load(entry + 1) * TOKENS
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
    first_key = first // TILE * TILE
    part_end = end
    if PARTED:
        # A part consists of whole tiles of keys, which are cut at multiples of their length, as without parts.
        part_keys = tl.cdiv(tl.cdiv(end - first_key, tl.load(entry + 3)), TILE) * TILE
        first_key += tl.load(entry + 2) * part_keys
        part_end = tl.minimum(first_key + part_keys, end)
    masked_start = first_key
    if not (WINDOWED or PARTED):  # a part is short, and a second loop would fill its pipeline again
        masked_start = (lowest + 1) // TILE * TILE
        for start in range(0, masked_start, TILE):
            acc, peak, total = attend_tile(
                queries,
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
                KV_HEADS,
                DIM,
                PAGE,
                TILE,
                False,
                WINDOWED,
                WIDE,
            )
    for start in range(masked_start, part_end, TILE):
        acc, peak, total = attend_tile(
            queries,
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
            KV_HEADS,
            DIM,
            PAGE,
            TILE,
            True,
            WINDOWED,
            WIDE,
        )
    if PARTED:
        row = (tl.load(entry + 4) * KV_HEADS + head) * TILE_ROWS + rows
        tl.store(sums + row[:, None] * DIM + dims[None, :], acc, mask=(dims < DIM)[None, :])
        # No mask is needed: the scratch also has room for rows that do not exist.
        tl.store(peaks + row, peak)
        tl.store(totals + row, total)
    else:
        # Rows beyond the chunk may have seen no key.
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + at * out_stride + columns, acc.to(out.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["first_merged"])
def _add_tile_parts(
    query_starts,
    tiles,
    merged,
    first_merged,
    sums,
    peaks,
    totals,
    out,
    out_stride,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    follow(EARLY)
    head = tl.program_id(1)
    entry = tiles + 5 * tl.load(merged + first_merged + tl.program_id(2))
    sequence = tl.load(entry)
    tile_start = tl.load(entry + 1) * TOKENS
    parts = tl.load(entry + 3)
    slot = tl.load(entry + 4)
    begin = tl.load(query_starts + sequence)
    tile_end = tl.minimum(tile_start + TOKENS, tl.load(query_starts + sequence + 1) - begin)

    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED)
    tokens = tile_start + rows // GROUP
    there = tokens < tile_end
    written = there[:, None] & (dims < DIM)[None, :]
    acc = tl.zeros([ROWS, PADDED], dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    peak = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    for part in range(parts):
        row = ((slot + part) * KV_HEADS + head) * TILE_ROWS + rows
        part_peak = tl.load(peaks + row, mask=there, other=float("-inf"))
        part_total = tl.load(totals + row, mask=there, other=0.0)
        part_acc = tl.load(sums + row[:, None] * DIM + dims[None, :], mask=written, other=0.0)
        higher = tl.maximum(peak, part_peak)
        # As in `attend_tile`: a part, or all parts so far, may have seen no key.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(peak - level)
        weight = tl.exp2(part_peak - level)
        total = tl.fma(total, shrink, part_total * weight)
        acc = tl.fma(acc, shrink[:, None], part_acc * weight[:, None])
        peak = higher
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    columns = (head * GROUP + rows % GROUP)[:, None] * DIM + dims[None, :]
    at = (begin + tokens).to(tl.int64)[:, None]
    tl.store(out + at * out_stride + columns, acc.to(out.dtype.element_ty), mask=written)
