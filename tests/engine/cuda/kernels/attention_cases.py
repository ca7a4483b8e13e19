"""Random steps for the attention kernels, with NaN in all memory that must not be read, and float32 references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import Phase
from torch import Tensor

from engine.backend.cuda.kernels.attend import PartSums
from engine.backend.cuda.kernels.decode import decode_scratch, paged_decode
from engine.backend.cuda.kernels.prefill import paged_prefill, prefill_scratch, tiling_for
from engine.backend.cuda.kernels.step import DecodeTensors
from engine.backend.cuda.kernels.tiling import Tiling
from tests.engine.cuda.cutting import prefill_tensors

LAYERS = 3
LAYER = 1
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 6e-2}
"""Tolerance for outputs of up to 4: two units in the last place. Triton's interpreter truncates to bfloat16, and
devices round."""

UNSHRUNK = (Phase.explicit, Phase.generate)
"""For settings(phases=): shrinking a failing example would take minutes in the interpreter."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's attention and the pool's pages."""

    kv_heads: int = 2
    group: int = 2
    dim: int = 16
    page: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


@dataclass(frozen=True, slots=True)
class Vectors:
    """One sequence's queries, keys and values at all its positions."""

    q: Tensor
    k: Tensor
    v: Tensor


def sequence(shape: Shape, tokens: int, seed: int) -> Vectors:
    """Return random vectors for `tokens` positions. The softmax of their scores is neither flat nor a single peak."""
    made = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(tokens, heads, shape.dim, generator=made).to(shape.dtype)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    return Vectors(q * 2, k, v)


def expected(shape: Shape, whole: Vectors, positions: Sequence[int]) -> Tensor:
    """Return the attention at these positions in float32: [positions, heads * dim]."""
    at = torch.tensor(positions)
    keys = torch.arange(int(at.max()) + 1)
    seen = keys <= at[:, None]
    if shape.window is not None:
        seen &= keys > at[:, None] - shape.window
    q = whole.q.float()[at].unflatten(1, (shape.kv_heads, shape.group))
    scores = torch.einsum("tkgd,skd->tkgs", q, whole.k.float()[keys]) * shape.dim**-0.5
    weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
    return torch.einsum("tkgs,skd->tkgd", weights, whole.v.float()[keys]).flatten(1)


def poison(scratch: PartSums) -> None:
    """Fill the scratch with NaN."""
    for part in (scratch.sums, scratch.peaks, scratch.totals):
        part.fill_(float("nan"))


class Paged:
    """Sequences in pages all over a pool. Memory that no query may see is NaN, and so are other layers."""

    def __init__(self, shape: Shape, device: torch.device, *, seed: int = 0, spare: int = 2) -> None:
        self.shape = shape
        self.device = device
        self._random = torch.Generator().manual_seed(seed)
        self._spare = spare

    def pool(self, sequences: Sequence[Vectors], lengths: Sequence[int], width: int = 0) -> tuple[Tensor, Tensor]:
        """The pool and its tables [sequences, pages], with each sequence's first `lengths` tokens written.

        Table entries after the last page, up to `width`, name a block that the pool does not have.
        """
        shape, page = self.shape, self.shape.page
        counts = [-(-length // page) for length in lengths]
        # No sequence has block 0, because a masked load from a table gives 0.
        blocks = 1 + torch.randperm(sum(counts) + self._spare, generator=self._random)
        pool = torch.full(
            (1 + len(blocks), LAYERS, 2, page, shape.kv_heads, shape.dim), float("nan"), dtype=shape.dtype
        )
        tables = torch.full((len(lengths), max([width, 1, *counts])), 2**30, dtype=torch.int32)
        taken = 0
        for row, (whole, length, count) in enumerate(zip(sequences, lengths, counts, strict=True)):
            tables[row, :count] = blocks[taken : taken + count]
            taken += count
            at = torch.arange(length)
            block = tables[row, at // page].long()
            pool[block, LAYER, 0, at % page] = whole.k[:length]
            pool[block, LAYER, 1, at % page] = whole.v[:length]
        return pool.to(self.device), tables.to(self.device)

    def prefill(
        self,
        chunks: Sequence[tuple[Vectors, int, int]],
        *,
        padding: int = 0,
        forget: bool = False,
        tiling: Tiling | None = None,
    ) -> list[Tensor]:
        """Return the kernel's attention of chunks (sequence, start, end), each [end - start, heads * dim], on the CPU.

        `padding`: number of additional rows. `forget`: tokens before the window of a chunk's first token are NaN too,
        as if another sequence had taken their block. `tiling`: a cut other than the kernel's own.
        """
        shape = self.shape
        tiling = tiling or tiling_for(shape.heads, shape.kv_heads, self.device)
        pool, tables = self.pool([s for s, _, _ in chunks], [end for _, _, end in chunks])
        if forget and shape.window is not None:
            for row, (_, start, _) in enumerate(chunks):
                self._forget(pool, tables[row], start - shape.window + 1)
        tensors = prefill_tensors(tiling, [(end - start, start) for _, start, end in chunks], tables)
        q = self._rows([s.q[a:b] for s, a, b in chunks], padding)
        out = torch.full((tensors.tokens + padding, shape.heads * shape.dim), float("nan"), dtype=shape.dtype)
        out = out.to(self.device)
        scratch = prefill_scratch(tiling, shape.dim, self.device)
        poison(scratch)
        paged_prefill(q, pool, LAYER, out, tensors, scratch, window=shape.window, scale=shape.dim**-0.5)
        assert out[tensors.tokens :].isnan().all(), "rows that no tile names were written"
        return list(out[: tensors.tokens].cpu().split([b - a for _, a, b in chunks]))

    def decode(
        self,
        rows: Sequence[tuple[Vectors, int]],
        *,
        width: int = 0,
        scratch: PartSums | None = None,
        forget: bool = False,
    ) -> Tensor:
        """Return the kernel's attention of the last of `length` tokens for each (sequence, length), on the CPU:
        [rows, heads * dim]."""
        shape = self.shape
        pool, tables = self.pool([s for s, _ in rows], [length for _, length in rows], width)
        if forget and shape.window is not None:
            for row, (_, length) in enumerate(rows):
                self._forget(pool, tables[row], length - shape.window)
        if scratch is None:
            tokens = tables.shape[1] * shape.page
            scratch = decode_scratch(len(rows), tokens, shape.heads, shape.dim, self.device)
        poison(scratch)
        q = self._rows([s.q[max(length - 1, 0)][None] for s, length in rows], 0)
        out = torch.full((len(rows), shape.heads * shape.dim), float("nan"), dtype=shape.dtype, device=self.device)
        tensors = DecodeTensors(tables=tables, lengths=self._ints([length for _, length in rows]))
        paged_decode(q, pool, LAYER, out, tensors, scratch, window=shape.window, scale=shape.dim**-0.5)
        return out.cpu()

    def _rows(self, parts: Sequence[Tensor], padding: int) -> Tensor:
        """Return queries in the layout of a fused projection: rows of a wider matrix, whose rest is NaN."""
        q = torch.cat(list(parts)).flatten(1)
        wide = torch.full((len(q) + padding, q.shape[1] + 16), float("nan"), dtype=q.dtype)
        wide[: len(q), : q.shape[1]] = q
        rows: Tensor = wide.to(self.device)[:, : q.shape[1]].unflatten(1, (self.shape.heads, self.shape.dim))
        return rows

    def _forget(self, pool: Tensor, table: Tensor, before: int) -> None:
        for position in range(max(before, 0)):
            pool[table[position // self.shape.page], :, :, position % self.shape.page] = float("nan")

    def _ints(self, values: Sequence[int] | Sequence[tuple[int, int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)
