"""The most requested beginnings of prompts: prefix keys counted over the last minute, in bounded memory and time.

Every key of a request's chain is counted. A prefix is hot where a chain branches: many requests have it, and no single
longer prefix accounts for most of these requests. Counting is on only while somebody watches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.contract.keys import PrefixKey

WINDOW_S = 30.0
"""Counts cover the present window and the one before it."""
KEYS_PER_S = 20_000
"""Most keys counted in a second, which takes a few milliseconds. Further requests are skipped."""
MOST_KEYS = 32_768
"""Most keys of a window. Above this number, the rarest are forgotten (lossy counting, Manku and Motwani, VLDB 2002)."""
SAME_SHARE = 0.7
"""If a longer prefix accounts for this share of a shorter one's requests, the longer one stands for both."""
LEAST_COUNT = 3
LEAST_SHARE = 0.01
"""Share of the counted requests; rarer prefixes are not hot."""


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A beginning of prompts, identified by its last key."""

    key: PrefixKey
    model: str
    strides: int
    tokens: int
    """Estimated."""
    share: float
    """Share of the counted requests, 0 to 1."""


class _Node:
    __slots__ = ("count", "model", "parent", "strides", "tokens")

    def __init__(self, parent: PrefixKey | None, model: str, strides: int, tokens: float) -> None:
        self.parent = parent
        self.model = model
        self.strides = strides
        self.tokens = tokens
        self.count = 0


class HotPrefixes:
    """Counts over the last one to two `WINDOW_S`. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._nodes: dict[PrefixKey, _Node] = {}
        self._before: dict[PrefixKey, _Node] = {}
        self._requests = self._requests_before = 0
        self._until_s: float | None = None
        self._second = -math.inf
        self._spent = 0
        """Keys counted in this second."""

    def __len__(self) -> int:
        """Keys in memory."""
        return len(self._nodes) + len(self._before)

    def clear(self) -> None:
        """Forget all."""
        self._nodes, self._before = {}, {}
        self._requests = self._requests_before = 0
        self._until_s = None

    def add(self, model: str, keys: Sequence[PrefixKey], tokens_per_stride: float, now_s: float) -> None:
        """Count a request with these keys, shortest prefix first. It is skipped if this second's keys are used up. If
        it has more than a quarter of them, only its first keys are counted."""
        if now_s - self._second >= 1.0:
            self._second, self._spent = now_s, 0
        if not keys or self._spent >= KEYS_PER_S:
            return
        keys = keys[: KEYS_PER_S // 4]
        self._roll(now_s)
        self._spent += len(keys)
        self._requests += 1
        nodes, parent = self._nodes, None
        for strides, key in enumerate(keys, 1):
            node = nodes.get(key)
            if node is None:
                node = nodes[key] = _Node(parent, model, strides, strides * tokens_per_stride)
            node.count += 1
            parent = key
        if len(nodes) > MOST_KEYS:
            self._prune()

    def _roll(self, now_s: float) -> None:
        if self._until_s is None:
            self._until_s = now_s + WINDOW_S
        elif now_s >= self._until_s:
            is_next = now_s < self._until_s + WINDOW_S
            self._before, self._requests_before = (self._nodes, self._requests) if is_next else ({}, 0)
            self._nodes, self._requests = {}, 0
            self._until_s = now_s + WINDOW_S

    def _prune(self) -> None:
        """Forget the rarest keys. A key is at least as frequent as the keys after it, so chains stay whole."""
        least = 1
        while len(self._nodes) > MOST_KEYS // 2:
            self._nodes = {key: node for key, node in self._nodes.items() if node.count > least}
            least *= 2

    def hottest(self, most: int, now_s: float) -> list[HotPrefix]:
        """Return the hottest prefixes, hottest first. Looks at all keys in memory."""
        if self._until_s is not None:
            self._roll(now_s)
        requests = self._requests + self._requests_before
        least = max(LEAST_COUNT, LEAST_SHARE * requests)
        counts: dict[PrefixKey, int] = {}
        for nodes in (self._before, self._nodes):
            for key, node in nodes.items():
                counts[key] = counts.get(key, 0) + node.count
        covered: set[PrefixKey] = set()
        """Keys that a longer prefix stands for."""
        found: list[tuple[int, PrefixKey, _Node]] = []
        for key, count in counts.items():
            if count < least:
                continue
            node = self._nodes.get(key) or self._before[key]
            if node.parent is not None and count >= SAME_SHARE * counts.get(node.parent, 0):
                covered.add(node.parent)
            found.append((count, key, node))
        ends = [end for end in found if end[1] not in covered]
        ends.sort(key=lambda end: (-end[0], end[2].strides))
        return [
            HotPrefix(key, node.model, node.strides, round(node.tokens), count / requests)
            for count, key, node in ends[:most]
        ]
