"""How much a pod that publishes nothing can hold: its capacity as it told it, corrected by what its answers reuse."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from engine.contract.keys import PrefixKey

STEP = 0.1
"""Part of the way that the capacity goes towards what one answer shows of it."""
LEAST_SHARE, MOST_SHARE = 1 / 16, 2.0
"""Bounds of the corrected capacity, of what the pod told: others may use it too, and blocks may be shared unseen."""
ENOUGH_SIGNS = 3
"""Refutations from which a pod that tells no capacity has one: the first may be of a cache that was emptied."""
DEFAULT_BLOCK_TOKENS = 16
"""Of vLLM on GPUs; where blocks are larger and the pod does not tell, its capacity comes out a little too large."""
_MEAN_OF = 50
"""So many requests count in what a key stands for: prompts with images differ from text."""
_REGRET_FOLLOW = 0.05
_LOST_KEYS = 32_768
_MERGED_SHARE = 4.0
"""Of loose tokens, entries up to this many times the mean are made one when there are too many entries."""
_GIVE_UP_SHARE = 1 / 64


class Taken(NamedTuple):
    """What one request takes of a pod's cache."""

    tokens: int
    """Its prompt and its expected answer: an engine keeps the KV of both."""
    key_tokens: float
    """Tokens that a prefix key stands for, on average; above 0."""
    capacity_tokens: int | None
    """What the pod's cache holds, running requests included; None: it does not tell."""
    block_tokens: int | None
    """Tokens of a block: a request takes whole ones; None: it does not tell."""


class Room:
    """The cache of one pod as an LRU of so many tokens: keys, which requests share, and loose tokens, which none does.

    Loose are the tail of a prompt behind its last key, the answer, and the rest of the last block. The keys themselves
    are `Speculation`'s; this counts what lies beside them, and where the capacity lies.

    Every answer that reused less than was believed shows a key that the pod evicted though fewer tokens were used
    since: its capacity is at most those. Every answer that reused a key that had been given up here shows that the
    capacity is at least what was used since then. The estimate moves `STEP` of the way to either.
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
        """`limit`: keys given up that are remembered, and entries of loose tokens."""
        self._limit = limit
        self._told: int | None = None
        self._capacity = math.inf
        self._signs: list[float] = []
        """What the first refutations showed, while no capacity is known."""
        self._loose: deque[tuple[float, float]] = deque()
        """(Used at, tokens), oldest first."""
        self._ghosts: dict[PrefixKey, float] = {}
        """Keys given up for lack of room -> tokens given up until then; oldest first."""
        self._evicted_tokens = 0.0
        self._taken = 0
        """Requests, up to `_MEAN_OF`."""
        self.loose_tokens = 0.0
        self.key_tokens = 0.0

    @property
    def capacity_tokens(self) -> float:
        """What the pod is believed to hold at a time; infinite while nothing is known of it."""
        return self._capacity

    @property
    def is_told(self) -> bool:
        """Whether the pod has told what its cache holds."""
        return self._told is not None

    @property
    def told_tokens(self) -> int | None:
        """What the pod told."""
        return self._told

    def begin_with(self, capacity_tokens: float, told_tokens: int | None) -> None:
        """Know what another gateway has learnt. For a room that nothing was taken of yet. `told_tokens`: by the pod."""
        self._told = told_tokens
        self._capacity = capacity_tokens if told_tokens is None else self._bounded(capacity_tokens, told_tokens)

    def take(self, taken: Taken, keys: int, now_s: float) -> None:
        """A request of so many keys goes to the pod."""
        told = taken.capacity_tokens
        if told is not None and told != self._told and told > 0:
            was = self._told or (self._capacity if self._capacity < math.inf else None)
            # Another life of another size: what was learnt is a share of it.
            self._capacity = float(told) if was is None else self._bounded(self._capacity * told / was, told)
            self._told = told
        self._taken = min(self._taken + 1, _MEAN_OF)  # the first ones, when the model's tokens are not known, fade soon
        self.key_tokens += (taken.key_tokens - self.key_tokens) / self._taken
        block = taken.block_tokens or DEFAULT_BLOCK_TOKENS
        loose = -(-taken.tokens // block) * block - keys * taken.key_tokens
        if loose > 0:
            self._loose.append((now_s, loose))
            self.loose_tokens += loose
            if len(self._loose) > self._limit:
                self._merge_loose()

    def give_up(self, used_at_s: float) -> float:
        """Forget the loose tokens last used at `used_at_s` or before; how many these were."""
        loose, forgotten = self._loose, 0.0
        while loose and loose[0][0] <= used_at_s:
            forgotten += loose.popleft()[1]
        self.loose_tokens = self.loose_tokens - forgotten if loose else 0.0
        return forgotten

    def dropped(self, used_at_s: float) -> None:
        """Keys last used then were forgotten for another reason than room. While nothing is known of the capacity,
        nobody asks for what was used before."""
        if self._capacity == math.inf:
            self.give_up(used_at_s)

    def _merge_loose(self) -> None:
        """Halve the number of entries at least: neighbours become one, last used when the later of them was.

        None is larger than a small share of all, however many requests a cache has room for.
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
        """`keys` were given up for lack of room, and loose tokens with them: `tokens` in all."""
        ghosts = self._ghosts
        self._evicted_tokens += tokens
        for key in keys:
            ghosts.pop(key, None)
        ghosts |= dict.fromkeys(keys, self._evicted_tokens)
        if len(ghosts) > self._limit:
            for key in list(islice(ghosts, len(ghosts) - self._limit + int(self._limit * _GIVE_UP_SHARE))):
                del ghosts[key]

    def was_evicted(self, distance_tokens: float) -> None:
        """A key was gone from the pod, though so many tokens only had been used since: no larger is the cache."""
        if self._capacity == math.inf:
            self._signs.append(distance_tokens)
            if len(self._signs) >= ENOUGH_SIGNS:
                self._capacity = max(self._signs)
                self._signs.clear()
        elif distance_tokens < self._capacity:
            self._move(distance_tokens)

    def was_held(self, key: PrefixKey) -> bool:
        """A key was still there that was given up here: so large is the cache. False where it was not given up."""
        evicted_then = self._ghosts.pop(key, None)
        if evicted_then is None:
            return False
        if self._capacity < math.inf:
            self._move(self._capacity + self._evicted_tokens - evicted_then)
        return True

    def found_loose(self, tokens: float) -> None:
        """So many tokens were reused that stood under no key, as the answer in a conversation's next turn: they are
        under one now."""
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
    """How likely what pods evict is asked for again: then an eviction costs its prefill a second time."""

    def __init__(self) -> None:
        self._lost: dict[PrefixKey, None] = {}
        """Keys given up for lack of room and not asked for since, oldest first."""
        self._evicted = self._asked = 0.0

    @property
    def share(self) -> float:
        """Part of what was given up that came to be asked for again, where no pod was chosen that holds it, 0 to 1."""
        return min(1.0, self._asked / self._evicted) if self._evicted else 0.0

    def lost(self, keys: Sequence[PrefixKey]) -> None:
        """`keys` were given up by a pod."""
        lost = self._lost
        keep = 1 - _REGRET_FOLLOW * min(1.0, len(keys) / 256)
        self._evicted = keep * self._evicted + len(keys)
        self._asked *= keep
        lost |= dict.fromkeys(keys)
        if len(lost) > _LOST_KEYS:
            for key in list(islice(lost, len(lost) - _LOST_KEYS + int(_LOST_KEYS * _GIVE_UP_SHARE))):
                del lost[key]

    def asked(self, keys: Iterable[PrefixKey]) -> None:
        """`keys` are computed somewhere, as the pod chosen does not hold them."""
        if self._lost:
            missing, pop = object(), self._lost.pop
            self._asked += sum([pop(key, missing) is not missing for key in keys])
