"""The longest prefix that a prompt shares with an earlier one, to the byte: it shows what counting whole blocks loses.

The keys show which whole blocks are common. Less than one block remains: the bytes after the last common block. They
are compared with the bytes that follow the same blocks in earlier prompts. Only new continuations are kept, at most two
per prompt.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from loadgen.analyze.align import common_bytes
from loadgen.analyze.blocks import Sharing

_ROOT = -1


class ExactMatcher:
    """Takes all prompts a second time, in the order in which the keys were taken."""

    def __init__(self, sharing: Sharing, stride: int) -> None:
        self._stride = stride
        self._starts: list[int] = sharing.starts.tolist()
        self._hits: list[int] = sharing.hit_blocks.tolist()
        first_seen = sharing.first_seen
        starts, hits = sharing.starts[:-1], sharing.hit_blocks
        at = starts + hits - 1
        self._nodes = np.where(hits > 0, first_seen[np.maximum(at, 0)] if len(first_seen) else _ROOT, _ROOT).tolist()
        self._is_left = np.zeros(len(first_seen) + 1, dtype=bool)  # index -1 is the root
        self._is_left[self._nodes] = True
        self._find_continuations(sharing)
        self._known: dict[int, list[bytes]] = {}

    def _find_continuations(self, sharing: Sharing) -> None:
        """Find the new blocks to compare with: those that begin where some prompt leaves the known paths."""
        first_seen, starts = sharing.first_seen, sharing.starts
        parents = np.full(len(first_seen), _ROOT, dtype=np.int64)
        parents[1:] = first_seen[:-1]
        parents[starts[:-1][starts[:-1] < starts[1:]]] = _ROOT
        wanted = np.flatnonzero((first_seen == np.arange(len(first_seen))) & self._is_left[parents])
        self._wanted, self._wanted_parents = wanted.tolist(), parents[wanted].tolist()
        self._wanted_starts = np.searchsorted(wanted, starts).tolist()
        is_empty = starts[:-1] == starts[1:]
        last = first_seen[np.maximum(starts[1:] - 1, 0)] if len(first_seen) else np.full(len(is_empty), _ROOT)
        self._ends = np.where(is_empty, _ROOT, last).tolist()

    def match(self, number: int, text: bytes) -> int:
        """Return the length in bytes of the longest prefix that prompt `number` shares with an earlier prompt."""
        stride, start = self._stride, self._starts[number]
        depth = self._hits[number] * stride
        common = self._longest(self._nodes[number], text[depth : depth + stride])
        for i in range(self._wanted_starts[number], self._wanted_starts[number + 1]):
            at = (self._wanted[i] - start) * stride
            self._add(self._wanted_parents[i], text[at : at + stride])
        if self._is_left[self._ends[number]]:
            blocks = self._starts[number + 1] - start
            self._add(self._ends[number], text[blocks * stride :])
        return depth + common

    def _longest(self, node: int, tail: bytes) -> int:
        known = self._known.get(node)
        if not known or not tail:
            return 0
        # In a sorted list, a neighbour has the longest common prefix.
        at = bisect_left(known, tail)
        return max(common_bytes(tail, 0, other, 0) for other in known[max(at - 1, 0) : at + 1])

    def _add(self, node: int, tail: bytes) -> None:
        if tail:
            insort(self._known.setdefault(node, []), tail)
