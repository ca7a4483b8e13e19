"""How much a pod that publishes nothing can hold: the capacity that it stated, corrected by what its answers reuse."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from engine.contract.keys import PrefixKey

STEP = 0.1
"""Part of the distance that the estimate moves towards the capacity that one answer shows."""
LEAST_SHARE, MOST_SHARE = 1 / 16, 2.0
"""Bounds of the corrected capacity, as shares of what the pod stated. It may be smaller because others use the pod, and
larger because requests share blocks that are not known here to be shared."""
ENOUGH_SIGNS = 3
"""Refutations after which a capacity is estimated if the pod states none. An emptied cache may cause the first one."""
DEFAULT_BLOCK_TOKENS = 16
"""vLLM's on GPUs. If blocks are larger and the pod does not say so, its capacity comes out a little too large."""
_MEAN_OF = 50
"""Requests that count in the mean of tokens per key: prompts with images differ from text."""
_REGRET_FOLLOW = 0.05
_LOST_KEYS = 32_768
_MERGED_SHARE = 4.0
"""When there are too many entries of loose tokens, neighbours are merged up to this many times the mean."""
_GIVE_UP_SHARE = 1 / 64


class Taken(NamedTuple):
    """What one request takes of a pod's cache."""

    tokens: int
    """Tokens of its prompt and its expected answer: an engine keeps the KV of both."""
    key_tokens: float
    """Tokens that a prefix key stands for, on average; above 0."""
    capacity_tokens: int | None
    """What the pod's cache holds, running requests included; None: unknown."""
    block_tokens: int | None
    """Tokens of a block: a request takes whole blocks; None: unknown."""


class CacheEstimate:
    """The cache of one pod as an LRU in tokens: keys, which requests share, and loose tokens, which belong to one
    request.

    Loose tokens are the tail of a prompt after its last key, the answer, and the rest of the last block. The keys
    themselves are in `SpeculativeEntries`. This class counts the loose tokens and estimates the capacity.

    If an answer reused less than was believed, the pod evicted a key, and the capacity is at most what was used since
    that key. If an answer reused a key that was given up here, the capacity is at least what was used since that key.
    The estimate moves `STEP` of the way to either bound.
    """

    __slots__ = (
        "_capacity",
        "_evicted_tokens",
        "_ghosts",
        "_limit",
        "_loose",
        "_signs",
        "_taken",
        "_told",
        "key_tokens",
        "loose_tokens",
    )

    def __init__(self, limit: int) -> None:
        """`limit`: how many given-up keys are remembered, and the most entries of loose tokens."""
        self._limit = limit
        self._told: int | None = None
        self._capacity = math.inf
        self._signs: list[float] = []
        """What the first refutations showed, in tokens, while no capacity is known."""
        self._loose: deque[tuple[float, float]] = deque()
        """(Last use, tokens), oldest first."""
        self._ghosts: dict[PrefixKey, float] = {}
        """Key given up for lack of room -> all tokens given up until then; oldest first."""
        self._evicted_tokens = 0.0
        self._taken = 0
        """Requests so far, up to `_MEAN_OF`."""
        self.loose_tokens = 0.0
        self.key_tokens = 0.0

    @property
    def capacity_tokens(self) -> float:
        """How many tokens the cache is believed to hold at most; infinite while its capacity is not known."""
        return self._capacity

    @property
    def is_told(self) -> bool:
        """Whether the pod has stated its capacity."""
        return self._told is not None

    @property
    def told_tokens(self) -> int | None:
        """The capacity that the pod stated; None: it stated none."""
        return self._told

    def begin_with(self, capacity_tokens: float, told_tokens: int | None) -> None:
        """Start from another gateway's estimate, before any request. `told_tokens`: the capacity that the pod
        stated."""
        self._told = told_tokens
        self._capacity = capacity_tokens if told_tokens is None else self._bounded(capacity_tokens, told_tokens)

    def take(self, taken: Taken, keys: int, now_s: float) -> None:
        """Count a request with `keys` prefix keys that goes to the pod."""
        told = taken.capacity_tokens
        if told is not None and told != self._told and told > 0:
            was = self._told or (self._capacity if self._capacity < math.inf else None)
            # The pod restarted with another capacity: keep the learnt ratio. Without a statement, keys that were gone
            # at once may have shown a capacity of 0, which is no ratio to anything.
            self._capacity = self._bounded(self._capacity * told / was, told) if was else float(told)
            self._told = told
        self._taken = min(self._taken + 1, _MEAN_OF)  # the first requests are guesses: they fade soon
        self.key_tokens += (taken.key_tokens - self.key_tokens) / self._taken
        block = taken.block_tokens or DEFAULT_BLOCK_TOKENS
        loose = -(-taken.tokens // block) * block - keys * taken.key_tokens
        if loose > 0:
            self._loose.append((now_s, loose))
            self.loose_tokens += loose
            if len(self._loose) > self._limit:
                self._merge_loose()

    def give_up(self, used_at_s: float) -> float:
        """Forget the loose tokens last used at `used_at_s` or before, and return how many these were."""
        loose, forgotten = self._loose, 0.0
        while loose and loose[0][0] <= used_at_s:
            forgotten += loose.popleft()[1]
        self.loose_tokens = self.loose_tokens - forgotten if loose else 0.0
        return forgotten

    def dropped(self, used_at_s: float) -> None:
        """Note that keys last used at `used_at_s` were forgotten, but not for lack of room. While no capacity is known,
        loose tokens from before that time have no use."""
        if self._capacity == math.inf:
            self.give_up(used_at_s)

    def _merge_loose(self) -> None:
        """Halve the number of entries, or more: neighbours become one entry, with the later of their last uses.

        No entry is larger than a small share of all, however many requests a cache has room for.
        """
        most = _MERGED_SHARE * self.loose_tokens / self._limit
        merged: deque[tuple[float, float]] = deque()
        at_s, sum_tokens = -math.inf, 0.0
        for used_at_s, tokens in self._loose:
            if sum_tokens and sum_tokens + tokens > most:
                merged.append((at_s, sum_tokens))
                sum_tokens = 0.0
            at_s, sum_tokens = used_at_s, sum_tokens + tokens
        merged.append((at_s, sum_tokens))
        self._loose = merged

    def given_up(self, keys: Sequence[PrefixKey], tokens: float) -> None:
        """Note that `keys` and loose tokens were given up for lack of room, `tokens` in all."""
        ghosts = self._ghosts
        self._evicted_tokens += tokens
        for key in keys:
            ghosts.pop(key, None)
        ghosts |= dict.fromkeys(keys, self._evicted_tokens)
        if len(ghosts) > self._limit:
            for key in list(islice(ghosts, len(ghosts) - self._limit + int(self._limit * _GIVE_UP_SHARE))):
                del ghosts[key]

    def was_evicted(self, distance_tokens: float) -> None:
        """Note that a key was gone although only `distance_tokens` had been used since: the cache is at most that
        large."""
        if self._capacity == math.inf:
            self._signs.append(distance_tokens)
            if len(self._signs) >= ENOUGH_SIGNS:
                self._capacity = max(self._signs)
                self._signs.clear()
        elif distance_tokens < self._capacity:
            self._move(distance_tokens)

    def was_held(self, key: PrefixKey) -> bool:
        """Note that a key was still there, and return whether it had been given up here: then the cache is larger."""
        evicted_then = self._ghosts.pop(key, None)
        if evicted_then is None:
            return False
        if self._capacity < math.inf:
            self._move(self._capacity + self._evicted_tokens - evicted_then)
        return True

    def found_loose(self, tokens: float) -> None:
        """Note that `tokens` that no key covered were reused, such as an answer in the conversation's next turn. A key
        covers them now."""
        left = min(tokens, self.loose_tokens)
        while left > 0 and self._loose:
            used_at_s, loose = self._loose.popleft()
            self.loose_tokens -= min(loose, left)
            if loose > left:
                self._loose.appendleft((used_at_s, loose - left))
            left -= loose

    def _move(self, towards_tokens: float) -> None:
        moved = self._capacity + STEP * (towards_tokens - self._capacity)
        self._capacity = moved if self._told is None else self._bounded(moved, self._told)

    @staticmethod
    def _bounded(tokens: float, told: int) -> float:
        return min(max(tokens, LEAST_SHARE * told), MOST_SHARE * told)


class Regret:
    """How likely it is that evicted keys are asked for again: then an eviction costs their prefill a second time."""

    def __init__(self) -> None:
        self._lost: dict[PrefixKey, None] = {}
        """Keys that were given up for lack of room and not asked for since, oldest first."""
        self._evicted = self._asked = 0.0

    @property
    def share(self) -> float:
        """Share of the given-up keys that were asked for again, and that the chosen pod did not hold; 0 to 1."""
        return min(1.0, self._asked / self._evicted) if self._evicted else 0.0

    def lost(self, keys: Sequence[PrefixKey]) -> None:
        """Note that a pod gave up `keys`."""
        lost = self._lost
        keep = 1 - _REGRET_FOLLOW * min(1.0, len(keys) / 256)
        self._evicted = keep * self._evicted + len(keys)
        self._asked *= keep
        lost |= dict.fromkeys(keys)
        if len(lost) > _LOST_KEYS:
            for key in list(islice(lost, len(lost) - _LOST_KEYS + int(_LOST_KEYS * _GIVE_UP_SHARE))):
                del lost[key]

    def asked(self, keys: Iterable[PrefixKey]) -> None:
        """Note that `keys` are computed somewhere because the chosen pod does not hold them."""
        if self._lost:
            missing, pop = object(), self._lost.pop
            self._asked += sum([pop(key, missing) is not missing for key in keys])
