"""The paged KV pool and attention over it in plain torch: the reference for faster kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.model.config import ModelConfig
from engine.sched.plan import SequenceChunk


def blocks_for_budget(config: ModelConfig, budget_bytes: int, *, block_size: int, dtype: torch.dtype) -> int:
    """KV blocks of `block_size` tokens that fit into `budget_bytes`. Raises ValueError where not even one does."""
    block_bytes = config.kv_bytes_per_token(dtype.itemsize) * block_size
    if budget_bytes < block_bytes:
        raise ValueError(f"a KV budget of {budget_bytes} bytes holds no block; one block takes {block_bytes} bytes")
    return budget_bytes // block_bytes


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
        self._pages = self.data.view(block_count * config.layers * 2, -1)
        self._slots = self.data.view(block_count * config.layers * 2 * block_size, -1)

    def page_rows(self, blocks: Sequence[int]) -> Tensor:
        """Rows of layer 0 in `layer_pages`: all key pages, then all value pages, [2 * blocks]."""
        keys = torch.tensor(blocks, dtype=torch.int64) * (self.layers * 2)
        return torch.cat((keys, keys + 1)).to(self.data.device)

    def layer_pages(self, layer: int) -> Tensor:
        """The pool as rows of one page [slot * kv_head * dim], shifted so that layer 0's row numbers mean `layer`."""
        return self._pages[2 * layer :]

    def slot_rows(self, chunk: SequenceChunk) -> Tensor:
        """Rows of layer 0's key slots where the chunk's tokens go, [tokens] on the CPU."""
        positions = torch.arange(chunk.start, chunk.start + len(chunk.tokens))
        blocks = torch.tensor(chunk.blocks, dtype=torch.int64)
        rows: Tensor = blocks[positions // self.block_size] * (self.layers * 2 * self.block_size)
        return rows + positions % self.block_size

    def write(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [T, kv_heads, dim] in the slots that `slot_rows` named."""
        start = 2 * layer * self.block_size
        self._slots[start:].index_copy_(0, rows, k.flatten(1))
        self._slots[start + self.block_size :].index_copy_(0, rows, v.flatten(1))


@dataclass(frozen=True, slots=True)
class _View:
    """What one chunk reads of the pool in layers of one window."""

    rows: Tensor
    """Pages that hold a token the chunk can see, as `KvPool.page_rows`."""
    tokens: slice
    """The tokens of those pages that are written and not before the window of all."""
    mask: Tensor | None
    """Added to the scores, [queries, keys]; None: all keys are seen by all queries."""


class PagedAttention:
    """Attention of one step: SDPA per chunk over its pages, gathered into a scratch buffer that stays in the CPU cache.

    Per sequence rather than over a padded batch: no padding is computed, nothing unwritten is read, and a sequence's
    result does not depend on what else is in the step.
    """

    def __init__(self, pool: KvPool, config: ModelConfig, chunks: Sequence[SequenceChunk]) -> None:
        self._pool = pool
        self._windows = config.windows
        self._group = config.heads // config.kv_heads
        self._lengths = [len(chunk.tokens) for chunk in chunks]
        self._cold = [chunk.start == 0 for chunk in chunks]
        device = pool.data.device
        self._slots = torch.cat([pool.slot_rows(chunk) for chunk in chunks]).to(device)
        self._views = {w: [self._view(chunk, w) for chunk in chunks] for w in set(config.windows)}
        pages = max((len(view.rows) for views in self._views.values() for view in views), default=0)
        self._scratch = torch.empty((pages, pool.layer_pages(0).shape[1]), dtype=pool.data.dtype, device=device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `engine.model.decoder.Attention`."""
        self._pool.write(layer, self._slots, k, v)
        window = self._windows[layer]
        out = torch.empty_like(q)
        start = 0
        for length, cold, view in zip(self._lengths, self._cold, self._views[window], strict=True):
            end = start + length
            if cold and (window is None or length <= window):
                _causal(q[start:end], k[start:end], v[start:end], out[start:end])
            else:
                self._attend(layer, view, q[start:end], out[start:end])
            start = end
        return out.flatten(1)

    def _attend(self, layer: int, view: _View, q: Tensor, out: Tensor) -> None:
        """q [n, heads, dim] over the chunk's pages. The heads that share keys are one head with group * n queries."""
        n, heads, dim = q.shape
        pages = self._scratch[: len(view.rows)]
        torch.index_select(self._pool.layer_pages(layer), 0, view.rows, out=pages)
        kv = pages.view(2, -1, heads // self._group, dim)[:, view.tokens].transpose(1, 2)
        if view.mask is None and n == 1:
            grouped = q.view(1, heads // self._group, self._group, dim)
            attended = scaled_dot_product_attention(grouped, kv[:1], kv[1:])
            out.copy_(attended.view(1, heads, dim))
            return
        attended = scaled_dot_product_attention(
            q.transpose(0, 1)[None], kv[:1], kv[1:], attn_mask=view.mask, enable_gqa=self._group > 1
        )
        out.copy_(attended[0].transpose(0, 1))

    def _view(self, chunk: SequenceChunk, window: int | None) -> _View:
        pool, size = self._pool, self._pool.block_size
        end = chunk.start + len(chunk.tokens)
        first = max(0, chunk.start + 1 - window) if window else 0
        skipped = first // size
        rows = pool.page_rows(chunk.blocks[skipped : -(-end // size)])
        tokens = slice(first - skipped * size, end - skipped * size)
        return _View(rows, tokens, _mask(chunk.start, end, first, window, pool.data))


def _causal(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """A chunk at the start of its sequence: its keys and values are at hand, contiguous enough for SDPA."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    out.copy_(attended[0].transpose(0, 1))


def _mask(start: int, end: int, first: int, window: int | None, like: Tensor) -> Tensor | None:
    """0 where query start + i sees key first + j, else -inf: [end - start, end - first]; None for a single query."""
    if end - start == 1:
        return None
    queries = torch.arange(start, end, device=like.device)[:, None]
    keys = torch.arange(first, end, device=like.device)
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))
