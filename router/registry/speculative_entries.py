"""The keys that a gateway believes a pod holds because it sent requests there, in the order of their last use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby, islice
from operator import itemgetter
from struct import Struct
from typing import NewType

from engine.contract.keys import PrefixKey
from router.registry.cache_estimate import CacheEstimate, Taken

SETTLED_S = 5.0
"""The prompt of an older use is computed by now, or lost for good. A younger one may still be in the pod's queue."""
_EXPIRY_GRID_S = 0.0625
"""Entries expire up to this late, many at a time, because finding the oldest entry of a dict is slow after removals
at its front."""
_SAME_USE_S = 0.01
"""Two times of one use differ by less than this if one of them comes from another clock."""
_ROOM_SHARE = 1 / 64
"""Share of the limit, or of a full cache, that is given up at a time, for the reason of `_EXPIRY_GRID_S`."""
_LEAST_GHOSTS = 64


_USE = Struct("=ddd?")
_Use = NewType("_Use", bytes)
"""One use of consecutive keys; the keys share it, so that an entry costs one pointer. Never changed.

It is packed because the garbage collector tracks an object with fields (and an object of a subclass of bytes), and then
also the dict with a million of them. That would cost a pause of 40 ms (`engine/common/collector.py`).
"""


def _use(used_at_s: float, expires_at_s: float, settled_at_s: float = -math.inf, *, is_first: bool = False) -> _Use:
    """Pack one use. `settled_at_s`: the last earlier use that had settled, if the key was believed in ever since; -inf
    without one. `is_first`: whether the key was not believed in before this use."""
    return _Use(_USE.pack(used_at_s, expires_at_s, settled_at_s, is_first))


def _unpack(use: _Use) -> tuple[float, float, float, bool]:
    """Return the arguments from which `_use` made `use`."""
    return _USE.unpack(use)


def _expiry_s(at_s: float) -> float:
    return at_s if math.isinf(at_s) else math.ceil(at_s / _EXPIRY_GRID_S) * _EXPIRY_GRID_S


Run = tuple[float, Sequence[PrefixKey]]
"""The last use of some keys, and those keys, in the order in which they would be dropped."""


class SpeculativeEntries:
    """The speculative entries of one pod, at most `limit` of them: the longest unused go first.

    Expiry follows the order of use: an entry expires no earlier than those used before it. Within one use the deepest
    key counts as the oldest, so that dropping from the old end keeps the set prefix-closed.

    For a pod that publishes nothing, `take` counts what each request takes of its cache. A key is then dropped as soon
    as the tokens used after it fill the cache (`CacheEstimate`).
    """

    __slots__ = ("_estimate", "_limit", "_newest_expiry_s", "_uses", "believed", "next_expiry_s")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._uses: dict[PrefixKey, _Use] = {}
        self._newest_expiry_s = -math.inf
        self._estimate: CacheEstimate | None = None
        self.believed = self._uses.keys()
        """The keys that have an entry."""
        self.next_expiry_s = math.inf
        """No entry expires before this; infinity if there is none."""

    def __len__(self) -> int:
        return len(self._uses)

    def use(
        self, keys: Sequence[PrefixKey], now_s: float, ttl_s: float
    ) -> tuple[Sequence[PrefixKey], Sequence[PrefixKey]]:
        """Enter `keys`, shortest prefix first, as just used. Return the new keys, and the keys dropped to make room.

        With an infinite `ttl_s` the keys stay until there is no room for them.
        """
        expires_at_s = _expiry_s(now_s + ttl_s)
        expires_at_s = self._newest_expiry_s = max(expires_at_s, self._newest_expiry_s)
        self.next_expiry_s = min(self.next_expiry_s, expires_at_s)
        uses = self._uses
        new = []
        first = latest = _use(now_s, expires_at_s, is_first=True)
        before: _Use | None = None
        for key in reversed(keys):
            old = uses.pop(key, None)
            if old is None:
                uses[key] = first
                new.append(key)
                continue
            if old is not before:
                before = old
                used_at_s, _, settled_at_s, _ = _unpack(old)
                latest = _use(now_s, expires_at_s, used_at_s if now_s - used_at_s >= SETTLED_S else settled_at_s)
            uses[key] = latest
        if len(uses) <= self._limit:
            return new, ()
        too_many = list(islice(uses, len(uses) - self._limit + int(self._limit * _ROOM_SHARE)))
        if self._estimate is not None and too_many:
            self._estimate.dropped(_unpack(uses[too_many[-1]])[0])
        return new, self.discard(too_many)

    def take(self, taken: Taken, keys: int, now_s: float) -> Sequence[PrefixKey]:
        """Count what the request whose `keys` were just entered takes of the pod's cache. Return the keys for which
        there is no room any more. The request's own keys stay, however small the cache is thought to be."""
        estimate = self._estimate
        if estimate is None:
            estimate = self._estimate = self._new_estimate()
        estimate.take(taken, keys, now_s)
        excess = self._tokens(estimate) - estimate.capacity_tokens
        if excess <= 0:
            return ()
        left = excess = excess + estimate.capacity_tokens * _ROOM_SHARE
        gone: list[PrefixKey] = []
        seen: _Use | None = None
        for key, use in self._uses.items():
            if use is not seen:
                seen = use
                if (used_at_s := _unpack(use)[0]) >= now_s:
                    break
                left -= estimate.give_up(used_at_s)
            if left <= 0:
                break
            gone.append(key)
            left -= estimate.key_tokens
        estimate.given_up(self.discard(gone), excess - left)
        return gone

    def _new_estimate(self) -> CacheEstimate:
        return CacheEstimate(max(_LEAST_GHOSTS, self._limit // 4))

    def expect_capacity(self, capacity_tokens: float, told_tokens: int | None) -> None:
        """Use another gateway's estimate of the pod's capacity. `told_tokens`: the capacity that the pod stated."""
        if self._estimate is None:
            self._estimate = self._new_estimate()
            self._estimate.begin_with(capacity_tokens, told_tokens)

    @property
    def learnt_capacity(self) -> tuple[float, int | None] | None:
        """The estimated capacity, and the capacity that the pod stated; None while nothing is known of it."""
        estimate = self._estimate
        if estimate is None or estimate.capacity_tokens == math.inf:
            return None
        return estimate.capacity_tokens, estimate.told_tokens

    def free_tokens(self) -> float:
        """Return the tokens that the pod can take before it evicts something; infinite while no capacity is known."""
        estimate = self._estimate
        return math.inf if estimate is None else max(0.0, estimate.capacity_tokens - self._tokens(estimate))

    @property
    def has_estimate(self) -> bool:
        """Whether any request was counted in the pod's cache; if not, its free tokens are infinite."""
        return self._estimate is not None

    @property
    def capacity_is_told(self) -> bool:
        """Whether the pod has stated its capacity."""
        return self._estimate is not None and self._estimate.is_told

    def was_held(self, key: PrefixKey, tokens: float) -> None:
        """Note that an answer reused `tokens` more than was believed; `key` is the first key not believed."""
        if self._estimate is not None and not self._estimate.was_held(key):
            self._estimate.found_loose(tokens)

    def _tokens(self, estimate: CacheEstimate) -> float:
        return len(self._uses) * estimate.key_tokens + estimate.loose_tokens

    def runs(self) -> list[Run]:
        """Return all entries, in the order in which they would be dropped."""
        return [
            (_unpack(use)[0], [key for key, _ in entries])
            for use, entries in groupby(self._uses.items(), key=itemgetter(1))
        ]

    def merge(self, runs: Iterable[Run], now_s: float, ttl_s: float) -> tuple[Sequence[PrefixKey], Sequence[PrefixKey]]:
        """Enter another gateway's entries; for each key the newer use counts. Return the new keys, and the keys dropped
        to make room."""
        uses = self._uses
        found: dict[PrefixKey, _Use] = {}
        for used_at_s, keys in runs:
            expires_at_s = _expiry_s(used_at_s + ttl_s)
            if expires_at_s <= now_s:
                continue
            use = _use(used_at_s, expires_at_s)
            for key in keys:
                old = found.get(key) or uses.get(key)
                if old is None or _unpack(old)[0] + _SAME_USE_S < used_at_s:
                    found[key] = use
        if not found:
            return (), ()
        new = [key for key in found if key not in uses]
        entries = sorted({**uses, **found}.items(), key=lambda entry: _unpack(entry[1])[0])
        uses.clear()
        uses.update(entries)
        self.next_expiry_s = min(self.next_expiry_s, _unpack(entries[0][1])[1])
        self._newest_expiry_s = max(self._newest_expiry_s, _unpack(entries[-1][1])[1])
        if len(uses) <= self._limit:
            return new, ()
        return new, self.discard(list(islice(uses, len(uses) - self._limit)))

    def retract(self, keys: Iterable[PrefixKey]) -> list[PrefixKey]:
        """Drop the keys of `keys` that only one use vouches for, and return them."""
        return self.discard([key for key in keys if (use := self._uses.get(key)) is not None and _unpack(use)[3]])

    def unused_since(self, keys: Iterable[PrefixKey], used_at_s: float) -> list[PrefixKey]:
        """Return the keys of `keys` that were last used at `used_at_s` or before."""
        uses = self._uses
        return [key for key in keys if (use := uses.get(key)) is not None and _unpack(use)[0] <= used_at_s]

    def refute(self, keys: Sequence[PrefixKey], strides: int) -> list[PrefixKey]:
        """Drop `keys[strides:]` and all keys last used before `keys[strides]` was (LRU evicts them earlier); return
        them."""
        refuted = self._uses.get(keys[strides]) if strides < len(keys) else None
        dropped = self.discard(keys[strides:])
        if refuted is not None and (horizon_s := _unpack(refuted)[2]) > -math.inf:
            older = []
            seen: _Use | None = None
            for key, use in self._uses.items():
                if use is not seen and _unpack(use)[0] > horizon_s:
                    break
                seen = use
                older.append(key)
            dropped += self.discard(older)
            if (estimate := self._estimate) is not None:
                estimate.give_up(horizon_s)
                estimate.was_evicted(self._tokens(estimate))
        return dropped

    def discard(self, keys: Iterable[PrefixKey]) -> list[PrefixKey]:
        """Drop the keys of `keys` that have an entry, and return them."""
        pop = self._uses.pop
        return [key for key in keys if pop(key, None) is not None]

    def expire(self, now_s: float) -> list[PrefixKey]:
        """Drop the entries that have expired, and return their keys."""
        expired = []
        self.next_expiry_s = math.inf
        seen: _Use | None = None
        for key, use in self._uses.items():
            if use is not seen and (expires_at_s := _unpack(use)[1]) > now_s:
                self.next_expiry_s = expires_at_s
                break
            seen = use
            expired.append(key)
        if self._estimate is not None and seen is not None:
            self._estimate.dropped(_unpack(seen)[0])
        return self.discard(expired)
