"""Lays out a step's chunks as numpy arrays for `StepTensors`, so that one copy takes them all to the device."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.backend.cuda.kernels.step import DecodeTensors, PrefillTensors, StepTensors
from engine.backend.cuda.kernels.tiling import Round, Tiling
from engine.backend.cuda.packing import Array
from engine.sched.plan import PENDING, SequenceChunk

_MIN_TABLE_TOKENS = 1024
_FINE_TABLE_TOKENS = 8192
"""Tokens up to which table widths double; beyond they quadruple. Each width needs its own grid and CUDA graph, and a
width far above a sequence's length launches programs that have nothing to do."""


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """The sizes to which a step with only decode tokens is padded."""

    batch: int
    """Number of sequences."""
    width: int
    """Number of blocks in a table."""


@dataclass(frozen=True, slots=True)
class HostStep:
    """One step on the host."""

    chunks: tuple[SequenceChunk, ...]
    """The chunks in the order of their rows: prefill, then decode tokens."""
    sampling: tuple[SequenceChunk, ...]
    """The chunks that sample, in the order of their logits."""
    arrays: tuple[Array, ...]
    """tokens, slots, positions; decode's lengths, tables; prefill's tables, query_starts, contexts, tiles,
    merged; rows."""
    prefill_tokens: int
    rounds: tuple[Round, ...]
    """Launches of the prefill kernel."""
    has_decode: bool
    has_rows: bool
    pending_rows: NDArray[np.int64]
    """Rows whose token is a choice of the last step."""
    pending_choices: NDArray[np.int64]
    """The index of that choice for each of these rows."""

    def on_device(self, views: Sequence[Tensor]) -> StepTensors:
        """Return the step as tensors. `views`: `arrays` on the device."""
        rest = iter(views)
        tokens, slots, positions = next(rest), next(rest), next(rest)
        decode = DecodeTensors(lengths=next(rest), tables=next(rest)) if self.has_decode else None
        prefill = None
        if self.prefill_tokens:
            prefill = PrefillTensors(
                tokens=self.prefill_tokens,
                tables=next(rest),
                query_starts=next(rest),
                contexts=next(rest),
                tiles=next(rest),
                merged=next(rest),
                rounds=self.rounds,
            )
        return StepTensors(tokens, positions, slots, prefill, decode, next(rest) if self.has_rows else None)


def table_widths(max_blocks: int, block_size: int) -> tuple[int, ...]:
    """Return the widths of tables in blocks, for sequences of up to `max_blocks`."""
    widths, width = [], _MIN_TABLE_TOKENS // block_size
    while width < max_blocks:
        widths.append(width)
        width *= 2 if width * block_size < _FINE_TABLE_TOKENS else 4
    return (*widths, max_blocks)


class StepBuilder:
    """Builds steps. It keeps the block tables of running requests as arrays: converting thousands of ints at each step
    would take milliseconds."""

    def __init__(self, block_size: int, tiling: Tiling, widths: Sequence[int]) -> None:
        """`tiling`: the prefill kernel's. `widths`: from `table_widths`."""
        self._block_size = block_size
        self._tiling = tiling
        self._widths = widths
        self._tables: dict[int, tuple[Sequence[int], NDArray[np.int32]]] = {}
        """Request id -> blocks in the last step, as given and as an array."""

    def build(
        self, chunks: Sequence[SequenceChunk], choices: Mapping[int, int], shape: DecodeShape | None = None
    ) -> HostStep:
        """Return the step of these chunks. `shape`: pads the arrays; then all chunks must be decode tokens.

        `choices`: request id -> index of its token among the last step's choices. Raises ValueError for a PENDING token
        of a request that is not in `choices`.
        """
        self._tables = {chunk.request.id: self._table(chunk) for chunk in chunks}
        prefills = [chunk for chunk in chunks if not is_decode(chunk)]
        decodes = [chunk for chunk in chunks if is_decode(chunk)]
        ordered = (*prefills, *decodes)
        ends = np.cumsum([len(chunk.tokens) for chunk in ordered])
        rows = [int(end) - 1 for end, chunk in zip(ends, ordered, strict=True) if chunk.samples]
        has_rows = shape is None and len(rows) < int(ends[-1])
        wanted = [np.array(rows, dtype=np.int64)] if has_rows else []
        pending_rows, pending_choices = _pending(ordered, ends, choices)
        tiles = self._tiling.cut([(len(chunk.tokens), chunk.start) for chunk in prefills]) if prefills else None
        return HostStep(
            chunks=ordered,
            sampling=tuple(chunk for chunk in ordered if chunk.samples),
            arrays=(
                *self._per_token(ordered, shape.batch if shape else int(ends[-1])),
                *(self._decode(decodes, shape) if decodes else ()),
                *((*self._prefill(prefills), tiles.tiles, tiles.merged) if tiles else ()),
                *wanted,
            ),
            prefill_tokens=sum(len(chunk.tokens) for chunk in prefills),
            rounds=tiles.rounds if tiles else (),
            has_decode=bool(decodes),
            has_rows=has_rows,
            pending_rows=pending_rows,
            pending_choices=pending_choices,
        )

    def _table(self, chunk: SequenceChunk) -> tuple[Sequence[int], NDArray[np.int32]]:
        known = self._tables.get(chunk.request.id)
        if known is not None and (known[0] is chunk.blocks or known[0] == chunk.blocks):
            return known
        if known is not None and known[0] == chunk.blocks[: len(known[0])]:
            more = np.array(chunk.blocks[len(known[0]) :], dtype=np.int32)
            return chunk.blocks, np.concatenate((known[1], more))
        return chunk.blocks, np.array(chunk.blocks, dtype=np.int32)

    def _per_token(self, chunks: Sequence[SequenceChunk], rows: int) -> tuple[Array, Array, Array]:
        """Return tokens, slots, positions of `rows` rows; the rows after the chunks are padding."""
        tokens = np.zeros(rows, dtype=np.int64)
        slots = np.full(rows, -1, dtype=np.int64)
        positions = np.zeros(rows, dtype=np.int32)
        size, row = self._block_size, 0
        for chunk in chunks:
            count = len(chunk.tokens)
            part = slice(row, row + count)
            table = self._tables[chunk.request.id][1]
            if count == 1:  # Python is faster than numpy for one number
                tokens[row], positions[row] = chunk.tokens[0], chunk.start
                slots[row] = int(table[chunk.start // size]) * size + chunk.start % size
            else:
                tokens[part] = chunk.tokens
                positions[part] = at = np.arange(chunk.start, chunk.start + count)
                slots[part] = table[at // size].astype(np.int64) * size + at % size
            row += count
        np.maximum(tokens, 0, out=tokens)  # PENDING: overwritten on the device
        return tokens, slots, positions

    def _decode(self, chunks: Sequence[SequenceChunk], shape: DecodeShape | None) -> tuple[Array, Array]:
        """Return lengths, tables."""
        shape = shape or DecodeShape(len(chunks), self._width(chunks))
        lengths = np.zeros(shape.batch, dtype=np.int32)
        lengths[: len(chunks)] = [chunk.start + 1 for chunk in chunks]
        return lengths, self._stacked(chunks, shape)

    def _prefill(self, chunks: Sequence[SequenceChunk]) -> tuple[Array, Array, Array]:
        """Return tables, query_starts, contexts."""
        counts = [len(chunk.tokens) for chunk in chunks]
        return (
            self._stacked(chunks, DecodeShape(len(chunks), self._width(chunks))),
            np.cumsum([0, *counts]).astype(np.int32),
            np.array([chunk.start for chunk in chunks], dtype=np.int32),
        )

    def _width(self, chunks: Sequence[SequenceChunk]) -> int:
        longest = max(len(chunk.blocks) for chunk in chunks)
        return self._widths[bisect_left(self._widths, longest)]

    def _stacked(self, chunks: Sequence[SequenceChunk], shape: DecodeShape) -> NDArray[np.int32]:
        tables = np.zeros((shape.batch, shape.width), dtype=np.int32)
        for row, chunk in zip(tables, chunks, strict=False):
            table = self._tables[chunk.request.id][1]
            row[: len(table)] = table
        return tables


def is_decode(chunk: SequenceChunk) -> bool:
    """Return whether the chunk goes to the decode kernel, which takes one token of a sequence."""
    return chunk.decodes and len(chunk.tokens) == 1


def _pending(
    chunks: Sequence[SequenceChunk], ends: NDArray[np.int64], choices: Mapping[int, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    rows, sources = [], []
    for chunk, end in zip(chunks, ends, strict=True):
        if chunk.tokens[-1] == PENDING:
            if chunk.request.id not in choices:
                raise ValueError(f"the last step chose no token for request {chunk.request.id}, which waits for it")
            rows.append(int(end) - 1)
            sources.append(choices[chunk.request.id])
    return np.array(rows, dtype=np.int64), np.array(sources, dtype=np.int64)
