"""Batching: groups the blocks of a request into runs that move in one piece, and runs into jobs."""

from __future__ import annotations

from collections.abc import Sequence

from engine.tiers.copies.base import BlockPair, BlockRun, Direction


def batch(direction: Direction, pairs: Sequence[BlockPair], max_blocks: int) -> list[BlockRun]:
    """Return the pairs, each once, as runs of at most `max_blocks` (at least 1).

    Pairs are neighbours if their sources and targets are, wherever they are in the request: eviction hands out a
    sequence's blocks from the last to the first. Runs come in the order of their first pair in the request.
    """
    # Plain numbers, because this is a large part of the cost of copies for the thread that plans steps.
    runs: list[tuple[int, int, int, int]] = []
    first = shift = source = count = -1
    for next_shift, next_source, position in sorted([(to - at, at, i) for i, (at, to) in enumerate(pairs)]):
        if next_shift == shift and next_source == source + count and 0 < count < max_blocks:
            count += 1
            first = min(first, position)
        else:
            runs.append((first, source, shift, count))
            first, source, shift, count = position, next_source, next_shift, 1
    runs.append((first, source, shift, count))
    return [BlockRun(direction, at, at + by, blocks) for _, at, by, blocks in sorted(runs[1:])]


def jobs(runs: Sequence[BlockRun], max_blocks: int) -> list[Sequence[BlockRun]]:
    """Return the runs in their order as jobs of at most `max_blocks` blocks each. No run may have more."""
    found: list[list[BlockRun]] = []
    left = 0
    for run in runs:
        if run.blocks > left:
            found.append([])
            left = max_blocks
        found[-1].append(run)
        left -= run.blocks
    return list(found)
