"""The paged KV pool and attention over it in plain torch: the reference for faster kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.backend.torch_decode import SparseDecode
from engine.model.config import ModelConfig
from engine.sched.plan import SequenceChunk


def blocks_for_budget(config: ModelConfig, budget_bytes: int, *, block_size: int, dtype: torch.dtype) -> int:
    """Return the number of KV blocks of `block_size` tokens in `budget_bytes`. Raises ValueError if there is none."""
    block_bytes = config.kv_bytes_per_token(dtype.itemsize) * block_size
    if budget_bytes < block_bytes:
        raise ValueError(f"a KV budget of {budget_bytes} bytes holds no block; one block takes {block_bytes} bytes")
    return budget_bytes // block_bytes


@dataclass(frozen=True, slots=True)
class LayerView:
    """One layer of the pool. Each view is shifted so that the row numbers of layer 0 address this layer."""

    pages: Tensor
    """One page [slot * kv_head * dim] per row."""
    slots: Tensor
    """One slot [kv_head * dim] per row."""
    keys: Tensor
    """One head [dim] of a key slot per row: row slot * kv_heads + head. It has as many rows as `values`."""
    values: Tensor
    """The same for the value slots, addressed by the numbers of their key slots."""


class KvPool:
    """Keys and values of all blocks in one tensor, block-major, so that a tier can copy a block in one piece.

    `data` is [block, layer, 2, slot, kv_head, dim]; 2 is key, value. A slot is never read before a step has written it,
    so blocks are neither zeroed at the start nor when they are freed.
    """

    def __init__(
        self, config: ModelConfig, block_count: int, block_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_count = block_count
        self.block_size = block_size
        self.layers = config.layers
        shape = (block_count, config.layers, 2, block_size, config.kv_heads, config.head_dim)
        self.data = torch.empty(shape, dtype=dtype, device=device)
        self.views = tuple(_layer_view(self.data, layer) for layer in range(config.layers))

    def page_rows(self, blocks: Sequence[int]) -> Tensor:
        """Return the rows in `LayerView.pages`: all key pages, then all value pages, [2 * blocks]."""
        keys = torch.tensor(blocks, dtype=torch.int64) * (self.layers * 2)
        return torch.cat((keys, keys + 1)).to(self.data.device)

    def slot_rows(self, blocks: Sequence[Sequence[int]], start: int, end: int) -> NDArray[np.int64]:
        """Return the rows in `LayerView.slots` of the keys at positions start .. end - 1: [sequences, end - start].

        `blocks`: the blocks of each sequence. A slot's value is `block_size` rows after its key.
        """
        first, size = start // self.block_size, self.block_size
        # numpy: for so few numbers a torch operation costs several times as much.
        seen = np.array([b[first : -(-end // size)] for b in blocks], dtype=np.int64) * (self.layers * 2 * size)
        rows = (seen[:, :, None] + np.arange(size)).reshape(len(blocks), -1)
        return rows[:, start - first * size : end - first * size]

    def copy_sources(self, chunks: Sequence[SequenceChunk]) -> None:
        """Copy the rows of the blocks that chunks name as `source`. Call it before the rest of their step."""
        for chunk in chunks:
            if chunk.source is not None:
                target, rows = chunk.blocks[chunk.start // self.block_size], chunk.start % self.block_size
                self.data[target, :, :, :rows].copy_(self.data[chunk.source, :, :, :rows])

    def write(self, layer: int, rows: Tensor, kv: Tensor) -> None:
        """Store kv [T, 2, kv_heads, dim] in the slots `rows` [T, 2], numbered as in `slot_rows`."""
        self.views[layer].slots.index_put_((rows,), kv.flatten(2))


def _layer_view(data: Tensor, layer: int) -> LayerView:
    blocks, layers, _, block_size, kv_heads, dim = data.shape
    first, page_heads = 2 * layer, block_size * kv_heads
    heads = data.view(-1, dim)[first * page_heads :]
    rows = ((blocks - 1) * layers * 2 + 1) * page_heads
    return LayerView(
        pages=data.view(blocks * layers * 2, -1)[first:],
        slots=data.view(blocks * layers * 2 * block_size, -1)[first * block_size :],
        keys=heads[:rows],
        values=heads[page_heads:][:rows],
    )


@dataclass(frozen=True, slots=True)
class _View:
    """The part of the pool that one chunk reads in layers of one window."""

    step_rows: slice
    """The chunk's rows of the step's tokens."""
    pages: Tensor | None
    """Pages with a token that the chunk sees, as in `KvPool.page_rows`; None: the chunk sees only itself, causally."""
    tokens: slice
    """The tokens of those pages that are written and that at least one query sees."""
    mask: Tensor | None
    """Added to the scores, [queries, keys]; None: all queries see all keys."""


class PagedAttention:
    """Attention of one step. Each sequence is computed on its own, so it does not depend on the rest of the step, there
    is no padding, and no unwritten slot is read.

    Prefill chunks: SDPA over their pages, gathered into a scratch buffer that stays in the CPU's cache.
    Decode tokens: the same, or all at once by `SparseDecode` if `sparse`, that is, if torch supports it.
    """

    def __init__(self, pool: KvPool, config: ModelConfig, chunks: Sequence[SequenceChunk], *, sparse: bool) -> None:
        self._pool = pool
        self._windows = config.windows
        self._group = config.heads // config.kv_heads
        device = pool.data.device
        written = [_slot_rows(pool, run, run[0].start, run[0].start + len(run[0].tokens)) for run in _runs(chunks)]
        keys = np.concatenate([rows.ravel() for rows in written])
        self._slots = torch.from_numpy(np.stack((keys, keys + pool.block_size), axis=1)).to(device)
        apart: list[tuple[SequenceChunk, int]] = []
        single: list[tuple[SequenceChunk, int]] = []
        row = 0
        for chunk in chunks:
            (single if sparse and len(chunk.tokens) == 1 else apart).append((chunk, row))
            row += len(chunk.tokens)
        self._views = {w: [_view(pool, chunk, row, w) for chunk, row in apart] for w in set(config.windows)}
        self._single_rows = torch.tensor([row for _, row in single], dtype=torch.int64) if apart else None
        self._sparse = {w: _sparse(pool, config, [c for c, _ in single], w) for w in set(config.windows) if single}
        pages = max((len(v.pages) for views in self._views.values() for v in views if v.pages is not None), default=0)
        self._scratch = torch.empty((pages, pool.views[0].pages.shape[1]), dtype=pool.data.dtype, device=device)

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """See `engine.model.decoder.Attention`."""
        self._pool.write(layer, self._slots, kv)
        window = self._windows[layer]
        sparse = self._sparse.get(window)
        if sparse is not None and self._single_rows is None:
            return sparse.attend(q, self._pool.views[layer].keys, self._pool.views[layer].values).flatten(1)
        out = q.new_empty(q.shape)
        for view in self._views[window]:
            part = view.step_rows
            if view.pages is None:
                _causal(q[part], kv[part], out[part])
            else:
                self._attend(layer, view, view.pages, q[part], out[part])
        if sparse is not None:
            rows = self._single_rows
            out[rows] = sparse.attend(q[rows], self._pool.views[layer].keys, self._pool.views[layer].values)
        return out.flatten(1)

    def _attend(self, layer: int, view: _View, rows: Tensor, q: Tensor, out: Tensor) -> None:
        """Attend with q [n, heads, dim] over the chunk's pages. For one query, heads that share keys form a product."""
        n, heads, dim = q.shape
        pages = self._scratch[: len(rows)]
        torch.index_select(self._pool.views[layer].pages, 0, rows, out=pages)
        kv = pages.view(2, -1, heads // self._group, dim)[:, view.tokens].transpose(1, 2)
        if n == 1:
            grouped = q.view(1, heads // self._group, self._group, dim)
            out.copy_(scaled_dot_product_attention(grouped, kv[:1], kv[1:]).view(1, heads, dim))
        else:
            queries, gqa = q.transpose(0, 1)[None], self._group > 1
            attended = scaled_dot_product_attention(queries, kv[:1], kv[1:], attn_mask=view.mask, enable_gqa=gqa)
            out.copy_(attended[0].transpose(0, 1))


def _view(pool: KvPool, chunk: SequenceChunk, row: int, window: int | None) -> _View:
    length = len(chunk.tokens)
    end = chunk.start + length
    step_rows = slice(row, row + length)
    if chunk.start == 0 and (window is None or length <= window):
        return _View(step_rows, None, slice(0), None)
    first = first_seen(chunk, window)
    skipped = first // pool.block_size
    pages = pool.page_rows(chunk.blocks[skipped : -(-end // pool.block_size)])
    tokens = slice(first - skipped * pool.block_size, end - skipped * pool.block_size)
    return _View(step_rows, pages, tokens, _mask(chunk.start, end, first, window, pool.data))


def _sparse(pool: KvPool, config: ModelConfig, chunks: Sequence[SequenceChunk], window: int | None) -> SparseDecode:
    runs = [_slot_rows(pool, run, first_seen(run[0], window), run[0].start + 1) for run in _runs(chunks)]
    heads, kv_heads, dim = config.heads, config.kv_heads, config.head_dim
    return SparseDecode(runs, heads=heads, kv_heads=kv_heads, dim=dim, rows=len(pool.views[0].keys))


def _runs(chunks: Sequence[SequenceChunk]) -> list[list[SequenceChunk]]:
    """Group neighbouring chunks at the same positions of their sequences, to index each group in one operation."""
    return [list(run) for _, run in groupby(chunks, lambda chunk: (chunk.start, len(chunk.tokens)))]


def _slot_rows(pool: KvPool, run: Sequence[SequenceChunk], start: int, end: int) -> NDArray[np.int64]:
    return pool.slot_rows([chunk.blocks for chunk in run], start, end)


def first_seen(chunk: SequenceChunk, window: int | None) -> int:
    """Return the position of the first token that the chunk's first token sees."""
    return max(0, chunk.start + 1 - window) if window else 0


def _causal(q: Tensor, kv: Tensor, out: Tensor) -> None:
    """Attend within a chunk at the start of its sequence. Its keys and values are contiguous enough for SDPA."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, kv[:, 0], kv[:, 1]))
    attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    out.copy_(attended[0].transpose(0, 1))


def _mask(start: int, end: int, first: int, window: int | None, like: Tensor) -> Tensor | None:
    """Return [end - start, end - first]: 0 if query start + i sees key first + j, else -inf; None for one query."""
    if end - start == 1:
        return None
    queries = torch.arange(start, end, device=like.device)[:, None]
    keys = torch.arange(first, end, device=like.device)
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))
