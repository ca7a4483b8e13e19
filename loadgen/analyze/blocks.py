"""Which blocks of which prompts have been seen before: prefix keys of all prompts, folded into a trie of runs.

A block is a stride of the canonical bytes, or one id of a trace. Its name is the chained key of everything up to its
end: equal keys mean equal prefixes. A run is a chain of blocks that every prompt takes whole or not at all, so caches
can be simulated run by run instead of block by block. N prompts make at most 2 N runs.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from engine.contract.keys import prefix_keys

BYTES_PER_BLOCK_HELD = 60
"""Memory that one block costs at the peak, which is during the sort in `fold`."""

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(slots=True)
class KeyLog:
    """Keys of all prompts, in the order of the prompts."""

    block_tokens: int
    keys: array[int] = field(default_factory=lambda: array("Q"))
    ends: array[int] = field(default_factory=lambda: array("q"))
    tokens: array[float] = field(default_factory=lambda: array("d"))

    def add_text(self, text: bytes, stride: int, tokens: float) -> None:
        """Add a prompt given by its bytes; only whole strides count."""
        self._add(prefix_keys(text, 0, stride), tokens)

    def add_ids(self, ids: tuple[int, ...], tokens: float) -> None:
        """Add a prompt given by a trace's block ids; the last block may be partial."""
        chained = b"".join([(i & (2**64 - 1)).to_bytes(8, "little") for i in ids])
        self._add(prefix_keys(chained, 0, 8), tokens)

    def _add(self, keys: tuple[int, ...], tokens: float) -> None:
        self.keys.extend(keys)
        self.ends.append(len(self.keys))
        self.tokens.append(tokens)


@dataclass(frozen=True, slots=True)
class Sharing:
    """The prompts as paths through a trie. Positions count the blocks of all prompts, one after another."""

    block_tokens: int
    tokens: npt.NDArray[np.float64]
    """Length of each prompt."""
    starts: Ints
    """Position of each prompt's first block; the last entry is the number of all blocks."""
    first_seen: Ints
    """For each position, the first position with the same key; a new block has its own position."""
    hit_blocks: Ints
    """For each prompt, the number of its first blocks that earlier prompts had: the hits of an infinite cache."""
    run_blocks: Ints
    """Length of each run."""
    run_first: Ints
    """Position at which each run was first seen."""
    path_runs: Ints
    """Runs of all prompts, one after another."""
    path_starts: Ints
    """For each prompt, where its runs begin in `path_runs`; the last entry is the number of all runs."""

    @property
    def requests(self) -> int:
        """Return the number of prompts."""
        return len(self.tokens)

    def paths(self) -> list[list[int]]:
        """Return the runs of each prompt, first to last."""
        runs, starts = self.path_runs.tolist(), self.path_starts.tolist()
        return [runs[a:b] for a, b in pairwise(starts)]

    def hit_tokens(self) -> npt.NDArray[np.float64]:
        """Return the number of tokens of each prompt that an infinite cache has."""
        return np.minimum(self.hit_blocks * self.block_tokens, self.tokens)

    def hit_rate(self) -> float:
        """Return the share of all prompt tokens that an infinite cache has."""
        return share(float(self.hit_tokens().sum()), float(self.tokens.sum()))


def share(part: float, whole: float) -> float:
    """Return part / whole; 0 if `whole` is 0."""
    return part / whole if whole else 0.0


def hit_rate(log: KeyLog) -> float:
    """Return the share of all prompt tokens that an infinite cache has, without building the trie."""
    starts = _starts(log)
    hits = _hit_blocks(_first_seen(np.frombuffer(log.keys, dtype=np.uint64)), starts)
    tokens = np.array(log.tokens)
    return share(float(np.minimum(hits * log.block_tokens, tokens).sum()), float(tokens.sum()))


def fold(log: KeyLog) -> Sharing:
    """Return the trie of all prompts in the log."""
    starts = _starts(log)
    first_seen = _first_seen(np.frombuffer(log.keys, dtype=np.uint64))
    is_head, new = _run_heads(first_seen, starts)
    run_first = np.flatnonzero(is_head & new)
    run_at = np.cumsum(is_head & new) - 1
    heads = np.flatnonzero(is_head)
    return Sharing(
        block_tokens=log.block_tokens,
        tokens=np.array(log.tokens),
        starts=starts,
        first_seen=first_seen,
        hit_blocks=_hit_blocks(first_seen, starts),
        run_blocks=np.bincount(run_at[new], minlength=len(run_first)),
        run_first=run_first,
        path_runs=run_at[first_seen[heads]],
        path_starts=np.searchsorted(heads, starts),
    )


def _starts(log: KeyLog) -> Ints:
    return np.concatenate([[0], np.frombuffer(log.ends, dtype=np.int64)]).astype(np.int64)


def _first_seen(keys: npt.NDArray[np.uint64]) -> Ints:
    order = np.argsort(keys, kind="stable")
    in_order = keys[order]
    is_new = np.ones(len(keys), dtype=bool)
    is_new[1:] = in_order[1:] != in_order[:-1]
    first: Ints = np.empty(len(keys), dtype=np.int64)
    first[order] = order[is_new][np.cumsum(is_new) - 1]
    return first


def _hit_blocks(first_seen: Ints, starts: Ints) -> Ints:
    # Keys are chained: if a block was seen, its predecessor was seen. So the count is the length of the prefix.
    is_old = first_seen < np.arange(len(first_seen))
    before = np.concatenate([[0], np.cumsum(is_old)])
    hits: Ints = before[starts[1:]] - before[starts[:-1]]
    return hits


def _run_heads(first_seen: Ints, starts: Ints) -> tuple[Bools, Bools]:
    """Find where runs begin: a prompt's first block, after a block with several successors, after a prompt's end."""
    count = len(first_seen)
    new = first_seen == np.arange(count)
    begins = np.zeros(count, dtype=bool)
    begins[starts[:-1][starts[:-1] < starts[1:]]] = True
    parents = np.empty(count, dtype=np.int64)
    parents[1:] = first_seen[:-1]
    inner_new = np.flatnonzero(new & ~begins)
    successors = np.bincount(parents[inner_new], minlength=count)
    ended = np.zeros(count, dtype=bool)
    ended[first_seen[starts[1:][starts[:-1] < starts[1:]] - 1]] = True
    head_if_new = begins.copy()
    head_if_new[inner_new] = (successors[parents[inner_new]] != 1) | ended[parents[inner_new]]
    return head_if_new[first_seen], new
