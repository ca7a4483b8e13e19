"""How prompt chunks are cut for the prefill kernel: rows into tiles, and the keys of a short chunk's tiles into parts.

A short chunk behind a long cached prefix, the case that a prefix cache is for, has few tiles with many keys each: 100
tokens of a model with 8 KV heads are 32 programs, which leave three quarters of a large card idle. So they are cut
along the keys too, as decode is, and the parts' sums are added up by a second kernel ("Flash-Decoding for long-context
inference", Dao et al., 2023; the cost below is ours).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_PARTS = 16
PART_KEYS = 512
"""Least keys of a part."""
OVERHEAD_KEYS = 256
"""What a part costs besides its keys, in keys: filling the pipeline, writing its sums, and reading them again."""
SCRATCH_PROGRAMS = 1024
"""Programs (part of a tile, KV head) of one launch that leave sums: some 8 for each multiprocessor of a large card."""


class Round(NamedTuple):
    """One launch: rows of `tiles`, then rows of `merged`, from the first up to but without the last. All tiles of a
    launch are cut along the keys, or none is, and no row of `merged` belongs to it."""

    first_tile: int
    last_tile: int
    first_merged: int
    last_merged: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Every program of a step's chunks, for each KV head."""

    tiles: NDArray[np.int32]
    """(sequence, query tile within its chunk, part, parts, slot for the part's sums), [N, 5]. A tile's parts are
    neighbours, and so are their slots."""
    merged: NDArray[np.int32]
    """The rows of `tiles` that are the first of more than one part, [M]."""
    rounds: tuple[Round, ...]
    """Launches one after another: each uses the slots anew."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """The cut for one model on one card. It depends on a chunk and what is before it alone, so its bits do too."""

    tokens: int
    """Query tokens of a tile."""
    kv_heads: int
    processors: int
    """Multiprocessors of the card, each of which has room for one program."""

    @property
    def slots(self) -> int:
        """Parts, for all KV heads, whose sums there is room for."""
        return max(MAX_PARTS, SCRATCH_PROGRAMS // self.kv_heads)

    def tiles_of(self, tokens: int) -> int:
        """Tiles of a chunk of so many tokens."""
        return -(-tokens // self.tokens)

    def parts(self, tokens: int, keys: int) -> int:
        """Parts of each tile of a chunk whose last token sees `keys` keys: as many as end soonest on an idle card."""
        programs = self.tiles_of(tokens) * self.kv_heads
        most = min(MAX_PARTS, keys // PART_KEYS, self.slots // self.tiles_of(tokens))
        # As if the card ran one full set of programs after another.
        return min(
            range(1, max(1, most) + 1),
            key=lambda parts: -(-programs * parts // self.processors) * (keys / parts + OVERHEAD_KEYS),
        )

    def cut(self, chunks: Sequence[tuple[int, int]]) -> Tiles:
        """`chunks`: tokens of each, and tokens before it."""
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
