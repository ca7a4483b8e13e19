"""Attention of single tokens to their sequences' pages: parts of a sequence in parallel, then one sum over the parts.

The split of a sequence depends on its length alone, so a row's bits do not depend on its batch. The grids depend on
shapes alone, so launches can be captured in a CUDA graph: programs for parts that a row does not have return at once.
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
from engine.backend.cuda.kernels.step import DecodeTensors

PART_TOKENS = 256
"""The least length of a part: a sequence of 8k tokens and 4 KV heads fills a Hopper card, and the partial sums are 3 %
of the bytes of a part's keys and values."""
MAX_PARTS = 32
"""Longer sequences get longer parts: more parts would only make the sum over them, and the grid, larger."""
DOT_ROWS = 16
"""The fewest rows of a `tl.dot`."""

ADDING_REGISTERS = 128
"""The most registers of a thread that adds up parts: see `Launch.registers`."""
ADDING_DIMS = 64
"""Dimensions that one warp adds up: two for each thread, so that a multiprocessor works on many rows."""


def part_count(tokens: int) -> int:
    """Return the number of parts of a sequence of `tokens` tokens."""
    return min(MAX_PARTS, -(-tokens // PART_TOKENS))


def launch_for(dim: int, dtype: torch.dtype, group: int, device: torch.device) -> Launch:
    """Return the settings for heads of `dim`, `group` of which share a KV head; fixed, like `prefill.launch_for`.

    All the work is reading keys, so the bytes in flight matter, not the width of the products. To hide the memory's
    latency, a multiprocessor of an H200 needs some 40 KiB in flight, even if only two programs run on it, as for a
    single sequence.
    """
    rows = max(DOT_ROWS, triton.next_power_of_2(group))
    if dtype == torch.float32:
        return Launch(rows=rows, tile=16, warps=4, stages=1)
    return Launch(rows=rows, tile=64 if dim <= 128 else 32, warps=4, stages=5 if is_hopper(device) else 3)


def decode_scratch(batch: int, max_tokens: int, heads: int, dim: int, device: torch.device) -> PartSums:
    """Return scratch for `batch` rows of up to `max_tokens` tokens: [batch, heads, parts]."""
    return PartSums.make((batch, heads, part_count(max_tokens)), dim, device)


def paged_decode(
    q: Tensor,
    pool: Tensor,
    layer: int,
    out: Tensor,
    tensors: DecodeTensors,
    scratch: PartSums,
    *,
    window: int | None,
    scale: float,
) -> None:
    """Write the attention of q [B, heads, dim] to `out` [B, heads * dim]; a row of length 0 becomes zero.

    `pool` [block, layer, 2, slot, kv_head, dim] already holds the rows' own keys and values. q and out must be
    contiguous within a row. Raises ValueError if `scratch` is too small for the batch or the tables' width.
    """
    batch, heads, dim = q.shape
    page, kv_heads = pool.shape[3], pool.shape[4]
    launch = INTERPRETED if q.device.type == "cpu" else launch_for(dim, q.dtype, heads // kv_heads, q.device)
    tokens = tensors.tables.shape[1] * page
    if window is not None:
        tokens = min(tokens, window)
    parts = part_count(tokens)
    rows, _, room, _ = scratch.sums.shape
    if batch > rows or parts > room:
        raise ValueError(
            f"scratch has room for {rows} rows of {room} parts; {batch} rows of {parts} parts need a larger "
            "decode_scratch(batch, max_tokens, ...)"
        )
    columns = columns_for(dim)
    _attend_parts[(kv_heads, parts, batch)](
        q,
        q.stride(0),
        pool[:, layer],
        pool.stride(0),
        tensors.tables,
        tensors.tables.stride(0),
        tensors.lengths,
        scratch.sums,
        scratch.peaks,
        scratch.totals,
        room,
        window or 0,
        scale * LOG2_E,
        GROUP=heads // kv_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        PADDED=columns,
        PAGE=page,
        ROWS=launch.rows,
        TILE=launch.tile,
        PART_TOKENS=PART_TOKENS,
        MAX_PARTS=MAX_PARTS,
        WINDOWED=window is not None,
        WIDE=multiplies_wide(q),
        num_warps=launch.warps,
        num_stages=launch.stages,
        enable_fp_fusion=False,
        **early(q.device),
    )
    _add_parts[(heads, batch)](
        tensors.lengths,
        scratch.sums,
        scratch.peaks,
        scratch.totals,
        room,
        out,
        out.stride(0),
        window or 0,
        DIM=dim,
        PADDED=columns,
        TILE=launch.tile,
        PART_TOKENS=PART_TOKENS,
        MAX_PARTS=MAX_PARTS,
        WINDOWED=window is not None,
        num_warps=max(1, columns // ADDING_DIMS),
        maxnreg=ADDING_REGISTERS,
        enable_fp_fusion=False,
        **early(q.device),
    )


@triton.jit
def _parting(
    length,
    window,
    TILE: tl.constexpr,
    PART_TOKENS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Return the first token that the row sees, at which the first part begins, and the length of a part in tokens, a
    multiple of TILE."""
    first = 0
    if WINDOWED:
        first = tl.maximum(length - window, 0)
    return first, tl.maximum(tl.cdiv(length - first, MAX_PARTS * TILE) * TILE, PART_TOKENS)


@triton.jit(do_not_specialize=["table_stride", "room", "window"])
def _attend_parts(
    q,
    q_stride,
    keys,
    block_stride,
    tables,
    table_stride,
    lengths,
    sums,
    peaks,
    totals,
    room,
    window,
    scale,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PART_TOKENS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    WINDOWED: tl.constexpr,
    WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    follow(EARLY)
    # The heads of a slot are neighbours in the grid, too, so that their programs together read whole rows of memory.
    head = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.program_id(2)
    length = tl.load(lengths + row)
    first, part_tokens = _parting(length, window, TILE, PART_TOKENS, MAX_PARTS, WINDOWED)
    begin = first + part * part_tokens
    if begin >= length:
        return
    end = tl.minimum(begin + part_tokens, length)

    group = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED)
    heads = head * GROUP + group
    written = (group < GROUP)[:, None] & (dims < DIM)[None, :]
    queries = tl.load(q + row.to(tl.int64) * q_stride + heads[:, None] * DIM + dims[None, :], mask=written, other=0.0)
    if WIDE:
        queries = queries.to(tl.float32)
    positions = tl.zeros([ROWS], dtype=tl.int32) + (length - 1)
    acc = tl.zeros([ROWS, PADDED], dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    peak = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    keys += head * DIM
    table = tables + row.to(tl.int64) * table_stride
    # All tiles are masked: a part is short, and a second loop would fill its pipeline again. No tile begins before the
    # window.
    for start in range(begin, end, TILE):
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
            False,
            WIDE,
        )
    at = (row.to(tl.int64) * (KV_HEADS * GROUP) + heads) * room + part
    tl.store(peaks + at, peak, mask=group < GROUP)
    tl.store(totals + at, total, mask=group < GROUP)
    tl.store(sums + at[:, None] * DIM + dims[None, :], acc, mask=written)


@triton.jit(do_not_specialize=["room", "window"])
def _add_parts(
    lengths,
    sums,
    peaks,
    totals,
    room,
    out,
    out_stride,
    window,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    PART_TOKENS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    WINDOWED: tl.constexpr,
    EARLY: tl.constexpr,
):
    follow(EARLY)
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + row)
    first, part_tokens = _parting(length, window, TILE, PART_TOKENS, MAX_PARTS, WINDOWED)
    # Always the most parts that a row can have, for any width of the tables, so that the order of the sum is fixed.
    parts = tl.arange(0, MAX_PARTS)
    dims = tl.arange(0, PADDED)
    done = first + parts * part_tokens < length
    written = dims < DIM
    at = (row * tl.num_programs(0) + head) * room + parts
    peak = tl.load(peaks + at, mask=done, other=float("-inf"))
    total = tl.load(totals + at, mask=done, other=0.0)
    acc = tl.load(sums + at[:, None] * DIM + dims[None, :], mask=done[:, None] & written[None, :], other=0.0)
    highest = tl.max(peak, 0)
    weight = tl.exp2(peak - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(total * weight, 0)
    acc = tl.sum(acc * weight[:, None], 0)
    # The total is 0 only for a padding row, which has no parts.
    acc = acc / tl.where(total > 0, total, 1.0)
    tl.store(out + row * out_stride + head * DIM + dims, acc.to(out.dtype.element_ty), mask=written)
