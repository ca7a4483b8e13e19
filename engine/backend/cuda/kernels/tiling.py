"""Cuts prompt chunks for the prefill kernel: rows into tiles, and the keys of a short chunk's tiles into parts.

A short chunk after a long cached prefix, the main case of a prefix cache, has few tiles with many keys each: 100 tokens
of a model with 8 KV heads are 32 programs, which leave three quarters of a large card idle. So these tiles are also cut
along the keys, as in decode, and a second kernel adds the parts' sums up ("Flash-Decoding for long-context inference",
Dao et al., 2023; the cost model below is ours).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_PARTS = 16
PART_KEYS = 512
"""The fewest keys of a part."""
OVERHEAD_KEYS = 256
"""Overhead of a part in units of keys: filling the pipeline, writing the part's sums, and reading them again."""
SCRATCH_PROGRAMS = 1024
"""The most programs (part of a tile, KV head) of a launch that leave sums: some 8 per multiprocessor of a large
card."""


class Round(NamedTuple):
    """One launch: half-open ranges of rows of `tiles` and of `merged`. Either all tiles of a launch are cut along the
    keys, or none is cut and the range of `merged` is empty."""

    first_tile: int
    last_tile: int
    first_merged: int
    last_merged: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """All programs of a step's chunks, for each KV head."""

    tiles: NDArray[np.int32]
    """(sequence, query tile within its chunk, part, parts, slot for the part's sums), [N, 5]. A tile's parts are
    neighbours, and so are their slots."""
    merged: NDArray[np.int32]
    """The rows of `tiles` with the first part of a tile that has several, [M]."""
    rounds: tuple[Round, ...]
    """Launches one after another. Each launch reuses the slots."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """The cut for one model on one card. It depends only on a chunk and its prefix, and so do the result's bits."""

    tokens: int
    """Query tokens of a tile."""
    kv_heads: int
    processors: int
    """Multiprocessors of the card, each with room for one program."""

    @property
    def slots(self) -> int:
        """Number of parts whose sums, for all KV heads, fit the scratch."""
        return max(MAX_PARTS, SCRATCH_PROGRAMS // self.kv_heads)

    def tiles_of(self, tokens: int) -> int:
        """Return the number of tiles of a chunk of this many tokens."""
        return -(-tokens // self.tokens)

    def parts(self, tokens: int, keys: int) -> int:
        """Return the number of parts per tile with which an idle card computes the chunk soonest. The chunk's last
        token sees `keys` keys."""
        programs = self.tiles_of(tokens) * self.kv_heads
        most = min(MAX_PARTS, keys // PART_KEYS, self.slots // self.tiles_of(tokens))
        # This models a card that runs one full set of programs after another.
        return min(
            range(1, max(1, most) + 1),
            key=lambda parts: -(-programs * parts // self.processors) * (keys / parts + OVERHEAD_KEYS),
        )

    def cut(self, chunks: Sequence[tuple[int, int]]) -> Tiles:
        """Return the tiles of `chunks`: (tokens, tokens before the chunk) each."""
        parts = [self.parts(tokens, context + tokens) for tokens, context in chunks]
        tiles = [
            (sequence, tile, 0, 1, 0)
            for sequence, (tokens, _) in enumerate(chunks)
            if parts[sequence] == 1
            for tile in range(self.tiles_of(tokens))
        ]
        rounds = [Round(0, len(tiles), 0, 0)] if tiles else []
        merged: list[int] = []
        first_tile, first_merged = len(tiles), 0
        for sequence, (tokens, _) in enumerate(chunks):
            count = parts[sequence]
            for tile in range(self.tiles_of(tokens) if count > 1 else 0):
                if len(tiles) - first_tile + count > self.slots:
                    rounds.append(Round(first_tile, len(tiles), first_merged, len(merged)))
                    first_tile, first_merged = len(tiles), len(merged)
                merged.append(len(tiles))
                slot = len(tiles) - first_tile
                tiles += [(sequence, tile, part, count, slot + part) for part in range(count)]
        if merged:
            rounds.append(Round(first_tile, len(tiles), first_merged, len(merged)))
        return Tiles(np.array(tiles, dtype=np.int32), np.array(merged, dtype=np.int32), tuple(rounds))
