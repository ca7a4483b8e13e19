"""Attention on the CPU in one order: a query's bits depend on its own keys and values, and on nothing else in a step.

Keys are cut into tiles at fixed positions of their sequence. A tile's scores are one product of a shape that `heights`
allows (`engine.model.exact`), and so is its sum of values. Tiles are added from the first to the last. A key that a
query does not see has a weight of exactly 0, and adding 0 changes no sum. So it does not matter how many more tiles the
step's other queries see. The largest score is exact in any order. Weights are summed as one more column of the values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backend.torch_kv import KvPool, first_seen
from engine.model.config import ModelConfig
from engine.model.exact import HEIGHTS, NotExact, agreeing_classes, cancelling
from engine.sched.plan import SequenceChunk

KEYS = 128
"""Keys in a tile."""
_HEIGHTS = HEIGHTS[:-1]
_COLUMNS = 16
"""The number of the values' columns is a multiple of this: libraries compute the columns left over with other
code, differently for each row."""
_BATCHES = (1, 2, 3, 17)
"""Numbers of tiles in a call for which the library is tested."""
_SCORES = 2**21
"""Roughly the most scores that are computed at once: 8 MB."""
_GATHERED_KEYS = 4096
"""Roughly the most keys of decoding sequences that are read at once."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """How the products of one model's attention are cut."""

    kv_heads: int
    """The model's kv heads, each counted `repeats` times."""
    repeats: int
    """Parts into which the query heads of each of the model's kv heads are cut."""
    group: int
    """Query heads that are computed with one of `kv_heads`."""
    dim: int
    columns: int
    """Columns of the values: `dim` of them, one of ones, and zeros."""
    heights: tuple[int, ...]

    @staticmethod
    def measured(config: ModelConfig) -> TileShape:
        """Test the library, in the thread in which steps will run. Raises NotExact.

        A product has at least the rows of one query's group. If the library agrees with itself only at fewer rows, the
        group is cut, and each part reads the keys again.
        """
        group, dim = config.heads // config.kv_heads, config.head_dim
        columns = -(-(dim + 1) // _COLUMNS) * _COLUMNS
        agreed = _agreed(dim, columns, _HEIGHTS) or _agreed(dim, columns, (1,))
        if not agreed:
            raise NotExact(f"batched products of float32 matrices with {dim} and {KEYS} columns")
        repeats = min(cuts for cuts in range(1, group + 1) if group % cuts == 0 and group // cuts <= agreed[-1])
        part = group // repeats
        heights = tuple(height for height in agreed if height >= part)
        return TileShape(config.kv_heads * repeats, repeats, part, dim, columns, heights)

    def height(self, rows: int, tiles: int) -> int:
        """Return the height of the next call when `rows` rows are left: the least that holds them all, if they fill
        more than half of it; otherwise the largest that they fill."""
        most = [h for h in self.heights if h * tiles * KEYS <= _SCORES] or [self.heights[0]]
        enough = next((h for h in most if h >= rows), most[-1])
        below = [h for h in most if h <= rows]
        return enough if 2 * rows > enough or not below else below[-1]


def _agreed(dim: int, columns: int, heights: Sequence[int]) -> tuple[int, ...]:
    """Return the largest set of `heights` at which both of a tile's products have one order; () if there is none."""
    by_product = []
    for terms, width in ((dim, KEYS), (KEYS, columns)):
        x, w = cancelling(terms, width, torch.float32)
        if width == KEYS:  # the same memory order as the keys
            w = w.t().contiguous().t()
        by_product.append(agreeing_classes(partial(_in_batches, w=w), x, heights))
    scores, sums = by_product
    return max(
        (tuple(height for height in one if height in other) for one in scores for other in sums), key=len, default=()
    )


def _in_batches(rows: Tensor, w: Tensor) -> Tensor:
    """Compute rows [height, terms] @ w as tiles in calls of several sizes: [tiles, height, columns]."""
    return torch.cat([torch.bmm(rows.expand(n, -1, -1), w.expand(n, -1, -1).clone()) for n in _BATCHES])


@dataclass(frozen=True, slots=True)
class _Rows:
    """Queries of one chunk whose scores are computed at once."""

    queries: slice
    """Rows of the step's tokens."""
    height: int
    tiles: slice
    """The chunk's tiles that some query sees."""
    hidden: tuple[tuple[slice, Tensor], ...]
    """Masks of partly seen tiles: (tiles among `tiles`, [tiles, height, KEYS], True for a key that is not seen)."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk of several tokens."""

    keys: Tensor
    """Rows of `LayerView.keys`, kv head by kv head. The last key is repeated to fill the last tile."""
    tiles: int
    rows: tuple[_Rows, ...]


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences of one token each, computed together."""

    queries: Tensor
    """Rows of the step's tokens."""
    keys: Tensor
    """Like `_Chunk.keys`, sequence after sequence."""
    sequence_of: Tensor
    """Index of each tile's sequence."""
    number_of: Tensor
    """Index of each tile within its sequence."""
    most: int
    """Tiles of the longest sequence."""
    hidden: Tensor
    """[tiles, 1, KEYS], True for a key that is not seen."""


class ExactAttention:
    """Attention of one step: an `engine.model.decoder.Attention`. Rows after the chunks' rows stay zero."""

    def __init__(self, pool: KvPool, config: ModelConfig, chunks: Sequence[SequenceChunk], shape: TileShape) -> None:
        self._pool, self._shape = pool, shape
        self._kv_heads, self._windows = shape.kv_heads, config.windows
        self._scale = config.head_dim**-0.5
        written = [pool.slot_rows([c.blocks], c.start, c.start + len(c.tokens))[0] for c in chunks]
        keys = np.concatenate(written)
        self._slots = torch.from_numpy(np.stack((keys, keys + pool.block_size), axis=1))
        several: list[tuple[SequenceChunk, int]] = []
        single: list[tuple[SequenceChunk, int]] = []
        row = 0
        for chunk in chunks:
            (several if len(chunk.tokens) > 1 else single).append((chunk, row))
            row += len(chunk.tokens)
        kinds = set(config.windows)
        self._chunks = {w: [self._chunk(chunk, row, w) for chunk, row in several] for w in kinds}
        self._decodes = {w: [self._decode(part, w) for part in _parts(single, w)] for w in kinds}
        widths = [len(one.keys) for parts in self._chunks.values() for one in parts]
        widths += [len(one.keys) for parts in self._decodes.values() for one in parts]
        self._keys = torch.empty(max(widths), shape.dim)
        self._values = torch.zeros(max(widths), shape.columns)
        self._values[:, shape.dim] = 1

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """See `engine.model.decoder.Attention`."""
        self._pool.write(layer, self._slots, kv[: len(self._slots)])
        window = self._windows[layer]
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        scaled = q.float() * self._scale
        for chunk in self._chunks[window]:
            keys, values = self._gather(layer, chunk.keys)
            for rows in chunk.rows:
                self._attend(rows, scaled[rows.queries], keys, values, out[rows.queries])
        for decodes in self._decodes[window]:
            out[decodes.queries] = self._attend_each(decodes, scaled[decodes.queries], layer).to(out.dtype)
        return out.flatten(1)

    def _gather(self, layer: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys [kv_heads, tiles, KEYS, dim] and values [kv_heads, tiles, KEYS, columns] in float32."""
        view, count, dim = self._pool.views[layer], len(rows), self._shape.dim
        keys, values = self._keys[:count], self._values[:count]
        if view.keys.dtype == keys.dtype:
            torch.index_select(view.keys, 0, rows, out=keys)
        else:
            keys.copy_(view.keys.index_select(0, rows))
        values[:, :dim] = view.values.index_select(0, rows)
        heads = self._kv_heads
        return keys.view(heads, -1, KEYS, dim), values.view(heads, -1, KEYS, self._shape.columns)

    def _attend(self, rows: _Rows, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """q and out [queries, heads, dim]. Computes one kv head at a time."""
        n, group, dim = len(q), self._shape.group, self._shape.dim
        padded = q.new_zeros(self._kv_heads, rows.height, dim)
        padded[:, : n * group] = q.view(n, self._kv_heads, group, dim).transpose(0, 1).reshape(self._kv_heads, -1, dim)
        tiles = rows.tiles.stop - rows.tiles.start
        for head in range(self._kv_heads):
            scores = torch.bmm(padded[head].expand(tiles, -1, -1), keys[head, rows.tiles].transpose(1, 2))
            for where, hidden in rows.hidden:
                scores[where].masked_fill_(hidden, -torch.inf)
            _exp(scores.sub_(scores.amax(dim=(0, 2))[None, :, None]))
            sums = _summed(torch.bmm(scores, values[head, rows.tiles]))[: n * group]
            attended = sums[:, :dim] / sums[:, dim : dim + 1]
            out.view(n, self._kv_heads, group, dim)[:, head] = attended.view(n, group, dim)

    def _attend_each(self, decodes: _Decodes, q: Tensor, layer: int) -> Tensor:
        """q [sequences, heads, dim] -> [sequences, heads, dim] in float32."""
        n, group, dim, heads = len(q), self._shape.group, self._shape.dim, self._kv_heads
        height = self._shape.heights[0]
        padded = q.new_zeros(heads, n, height, dim)
        padded[:, :, :group] = q.view(n, heads, group, dim).transpose(0, 1)
        keys, values = self._gather(layer, decodes.keys)
        spread = padded.index_select(1, decodes.sequence_of).flatten(0, 1)
        scores = torch.bmm(spread, keys.flatten(0, 1).transpose(1, 2)).view(heads, -1, height, KEYS)
        scores.masked_fill_(decodes.hidden, -torch.inf)
        place = (slice(None), decodes.sequence_of, decodes.number_of)
        largest = q.new_full((heads, n, decodes.most, height), -torch.inf)
        largest[place] = scores.amax(dim=3)
        scores.sub_(largest.amax(dim=2).index_select(1, decodes.sequence_of)[..., None])
        _exp(scores)
        products = torch.bmm(scores.flatten(0, 1), values.flatten(0, 1)).view(heads, -1, height, self._shape.columns)
        by_number = q.new_zeros(decodes.most, heads, n, height, self._shape.columns)
        by_number.permute(1, 2, 0, 3, 4)[place] = products
        sums = _summed(by_number)[:, :, :group]
        attended = sums[..., :dim] / sums[..., dim : dim + 1]
        return attended.transpose(0, 1).reshape(q.shape)

    def _chunk(self, chunk: SequenceChunk, row: int, window: int | None) -> _Chunk:
        first, tiles, keys = self._tiles(chunk, window)
        blocks = tuple(self._blocks(chunk, row, first, window))
        return _Chunk(self._by_head(keys), tiles, blocks)

    def _blocks(self, chunk: SequenceChunk, row: int, first: int, window: int | None) -> Iterator[_Rows]:
        """Yield the chunk's queries in blocks. `first`: the chunk's first tile."""
        group, done = self._shape.group, 0
        while done < len(chunk.tokens):
            start = chunk.start + done
            left = len(chunk.tokens) - done
            most_tiles = (chunk.start + len(chunk.tokens) - 1) // KEYS + 1 - first
            height = self._shape.height(left * group, most_tiles)
            count = min(left, height // group)
            last = start + count - 1
            begin = (max(0, start + 1 - window) if window else 0) // KEYS
            end = last // KEYS + 1
            hidden = [self._hidden(start, count, height, slice(start // KEYS, end), begin, window)]
            if window and begin < start // KEYS:
                seen_by_all = min(max(0, last + 1 - window) // KEYS + 1, start // KEYS)
                hidden.append(self._hidden(start, count, height, slice(begin, seen_by_all), begin, window))
            queries = slice(row + done, row + done + count)
            yield _Rows(queries, height, slice(begin - first, end - first), tuple(hidden))
            done += count

    def _hidden(
        self, start: int, count: int, height: int, tiles: slice, begin: int, window: int | None
    ) -> tuple[slice, Tensor]:
        """Return an entry of `_Rows.hidden`. `tiles`: numbers in the sequence; `begin`: the block's first tile."""
        queries = np.minimum(np.arange(height) // self._shape.group, count - 1) + start
        keys = np.arange(tiles.start * KEYS, tiles.stop * KEYS).reshape(-1, 1, KEYS)
        hidden = keys > queries[:, None]
        if window is not None:
            hidden |= keys <= queries[:, None] - window
        return slice(tiles.start - begin, tiles.stop - begin), torch.from_numpy(hidden)

    def _decode(self, part: Sequence[tuple[SequenceChunk, int]], window: int | None) -> _Decodes:
        planned = [self._tiles(chunk, window) for chunk, _ in part]
        counts = [tiles for _, tiles, _ in planned]
        hidden = []
        for (first, tiles, _), (chunk, _) in zip(planned, part, strict=True):
            position = np.arange(first * KEYS, (first + tiles) * KEYS)
            unseen = position > chunk.start
            if window is not None:
                unseen |= position <= chunk.start - window
            hidden.append(unseen.reshape(-1, 1, KEYS))
        return _Decodes(
            queries=torch.tensor([row for _, row in part]),
            keys=self._by_head(np.concatenate([keys for *_, keys in planned])),
            sequence_of=torch.from_numpy(np.repeat(np.arange(len(part)), counts)),
            number_of=torch.from_numpy(np.concatenate([np.arange(count) for count in counts])),
            most=max(counts),
            hidden=torch.from_numpy(np.concatenate(hidden)),
        )

    def _tiles(self, chunk: SequenceChunk, window: int | None) -> tuple[int, int, NDArray[np.int64]]:
        """Return the first tile that the chunk sees, the number of tiles, and the slots of their keys."""
        end = chunk.start + len(chunk.tokens)
        first = first_seen(chunk, window) // KEYS
        tiles = -(-end // KEYS) - first
        slots = self._pool.slot_rows([chunk.blocks], first * KEYS, end)[0]
        return first, tiles, np.concatenate((slots, np.full(tiles * KEYS - len(slots), slots[-1])))

    def _by_head(self, slots: NDArray[np.int64]) -> Tensor:
        heads = np.arange(self._kv_heads)[:, None] // self._shape.repeats
        return torch.from_numpy((slots * (self._kv_heads // self._shape.repeats) + heads).ravel())


def _exp(scores: Tensor) -> None:
    """Exponentiate in place, by NumPy: it is twice as fast as torch here, and its result does not depend on a number's
    place in the array (`check_exp`)."""
    array = scores.numpy()
    np.exp(array, out=array)


def _summed(tiles: Tensor) -> Tensor:
    """[tiles, ...] -> their sum, from the first to the last, in the memory of the first."""
    total = tiles[0]
    for tile in tiles[1:]:
        total += tile
    return total


def _parts(
    single: Iterable[tuple[SequenceChunk, int]], window: int | None
) -> Iterator[list[tuple[SequenceChunk, int]]]:
    """Yield the sequences to compute at once: as many as have about `_GATHERED_KEYS` keys together, at least one."""
    part: list[tuple[SequenceChunk, int]] = []
    keys = 0
    for chunk, row in single:
        seen = chunk.start + 1 - first_seen(chunk, window)
        if part and keys + seen > _GATHERED_KEYS:
            yield part
            part, keys = [], 0
        part.append((chunk, row))
        keys += seen
    if part:
        yield part
