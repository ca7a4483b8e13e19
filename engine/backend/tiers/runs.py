"""Batching: which blocks of a request move in one copy."""

from __future__ import annotations

from collections.abc import Sequence

from engine.backend.tiers.base import BlockPair, BlockRun, Direction


def batch(direction: Direction, pairs: Sequence[BlockPair], max_blocks: int) -> list[BlockRun]:
    """The pairs, each once, as runs of at most `max_blocks` (at least 1).

    Pairs are neighbours where both source and target are, wherever they stand in the request: eviction hands out a
    sequence's blocks from the last to the first. Runs come in the order of their first pair in the request.
    """
    position = {pair: i for i, pair in enumerate(pairs)}
    runs: list[list[BlockPair]] = []
    for pair in sorted(pairs, key=lambda p: (p.target - p.source, p.source)):
        last = runs[-1] if runs else []
        if last and (pair.source, pair.target) == (last[-1].source + 1, last[-1].target + 1) and len(last) < max_blocks:
            last.append(pair)
        else:
            runs.append([pair])
    runs.sort(key=lambda run: min(position[pair] for pair in run))
    return [BlockRun(direction, *run[0], len(run)) for run in runs]
