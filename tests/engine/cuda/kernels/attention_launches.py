"""Launches of the attention kernels on the "meta" device, for `compiling.compiled`, with the heads of Llama 8B."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.backend.cuda.kernels.decode import decode_scratch, paged_decode
from engine.backend.cuda.kernels.prefill import paged_prefill, prefill_scratch, tiling_for
from engine.backend.cuda.kernels.step import DecodeTensors, PrefillTensors
from engine.backend.cuda.kernels.tiling import Round

HEADS, KV_HEADS = 32, 8
DIMS = (64, 80, 96, 128, 256)
WINDOWS = (None, 4096)


def sample() -> None:
    """Launch for Llama 8B, and for odd heads with a window."""
    launch(torch.bfloat16, 128, None)
    launch(torch.float16, 80, 4096)


def small() -> None:
    """Launch for heads that have fewer dimensions than a product on tensor cores needs."""
    launch(torch.float32, 8, 9)
    launch(torch.bfloat16, 8, None)


def bfloat16() -> None:
    """Launch every variant for bfloat16."""
    _all(torch.bfloat16)


def float16() -> None:
    """Launch every variant for float16."""
    _all(torch.float16)


def float32() -> None:
    """Launch every variant for float32."""
    _all(torch.float32)


def launch(dtype: torch.dtype, dim: int, window: int | None) -> None:
    """Launch a prefill of 100 tokens and a decode of 100 rows, in a pool larger than a card's memory."""
    qkv = _meta(100, (HEADS + 2 * KV_HEADS) * dim, dtype=dtype)
    q = qkv[:, : HEADS * dim].view(100, HEADS, dim)
    out = _meta(100, HEADS * dim, dtype=dtype)
    pool = _meta(1 << 15, 32, 2, 64, KV_HEADS, dim, dtype=dtype)
    chunks = PrefillTensors(
        tokens=100,
        tables=_meta(2, 129),
        query_starts=_meta(3),
        contexts=_meta(2),
        tiles=_meta(9, 5),
        merged=_meta(2),
        rounds=(Round(0, 5, 0, 0), Round(5, 9, 0, 2)),
    )
    parts = prefill_scratch(tiling_for(HEADS, KV_HEADS, q.device), dim, q.device)
    paged_prefill(q, pool, 3, out, chunks, parts, window=window, scale=dim**-0.5)
    rows = DecodeTensors(tables=_meta(100, 129), lengths=_meta(100))
    scratch = decode_scratch(100, 129 * 64, HEADS, dim, torch.device("meta"))
    paged_decode(q, pool, 3, out, rows, scratch, window=window, scale=dim**-0.5)


def _all(dtype: torch.dtype) -> None:
    for dim in DIMS:
        for window in WINDOWS:
            launch(dtype, dim, window)


def _meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
