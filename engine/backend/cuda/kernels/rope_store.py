"""The step between the fused QKV projection and attention: QK norm, rotary embedding, and the KV store into pages.

One program takes one token and a tile of its heads (query, key and value heads lie side by side). It reads them once,
writes queries back, and writes keys and values into their page.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.backend.cuda.kernels.early import early, follow

_TILE_ELEMENTS = 2048
_WARPS = 4
"""16 elements per thread."""


def rope_store(
    qkv: Tensor,
    turns: Tensor,
    slots: Tensor,
    qk_norm: Tensor | None,
    eps: float,
    pool: Tensor,
    layer: int,
    *,
    heads: int,
    kv_heads: int,
) -> None:
    """Rotate the queries in `qkv` in place; store rotated keys, and values, into `layer` of the pool.

    qkv [T, (heads + 2 kv_heads) * dim]: queries, keys, values; rotated pairs are neighbours (`rope.interleaved`).
    turns: float32 [T, 1, dim / 2, 2], (cosine, sine) of each pair: the parts of `rope.turns`.
    slots: int64 [T], block * block_size + offset; -1: the token's keys and values are not stored.
    qk_norm [heads + kv_heads, dim]: the weights of RMS norms before the rotation, with `eps`; None: no norms.
    pool: `KvPool.data`.
    """
    block_size, dim = pool.shape[3], pool.shape[5]
    all_heads, dim_tile = heads + 2 * kv_heads, triton.next_power_of_2(dim)
    head_tile = min(triton.next_power_of_2(all_heads), max(1, _TILE_ELEMENTS // dim_tile))
    _rope_store[(len(qkv), triton.cdiv(all_heads, head_tile))](
        qkv,
        turns,
        slots,
        qkv if qk_norm is None else qk_norm,
        pool[:, layer],
        eps,
        pool.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK_SIZE=block_size,
        HEAD_TILE=head_tile,
        DIM_TILE=dim_tile,
        NORMS=qk_norm is not None,
        num_warps=_WARPS,
        enable_fp_fusion=False,
        **early(qkv.device),
    )


@triton.jit
def _rope_store(
    qkv,
    turns,
    slots,
    qk_norm,
    pages,
    eps,
    block_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    DIM_TILE: tl.constexpr,
    NORMS: tl.constexpr,
    EARLY: tl.constexpr,
):
    follow(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE))[:, None]
    dim = tl.arange(0, DIM_TILE)[None, :]
    inside = (head < HEADS + 2 * KV_HEADS) & (dim < DIM)
    is_turned = head < HEADS + KV_HEADS
    places = qkv + token * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM + dim
    given = tl.load(places, mask=inside, other=0.0)
    x = given.to(tl.float32)
    if NORMS:
        scale = tl.rsqrt(tl.sum(x * x, axis=1)[:, None] / DIM + eps)
        weights = tl.load(qk_norm + head * DIM + dim, mask=inside & is_turned, other=0.0)
        # Rounded as `kernels.norm` does.
        x = ((x * scale).to(given.dtype).to(tl.float32) * weights.to(tl.float32)).to(given.dtype).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (HEAD_TILE, DIM_TILE // 2, 2)))
    turn = tl.load(turns + token * DIM + dim, mask=dim < DIM, other=0.0)
    cosine, sine = tl.split(tl.reshape(turn, (1, DIM_TILE // 2, 2)))
    turned = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
    result = tl.where(is_turned, tl.reshape(turned, (HEAD_TILE, DIM_TILE)).to(given.dtype), given)
    tl.store(places, result, mask=inside & (head < HEADS))
    slot = tl.load(slots + token)
    if slot >= 0:
        stored = head - HEADS  # Key heads, then value heads; a page holds all slots' keys before their values.
        row = (stored // KV_HEADS * BLOCK_SIZE + slot % BLOCK_SIZE) * KV_HEADS + stored % KV_HEADS
        page = pages + slot // BLOCK_SIZE * block_stride
        tl.store(page + row * DIM + dim, result, mask=inside & (head >= HEADS))
