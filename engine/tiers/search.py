"""Finds what a shared tier holds of a request's prompt: one look-up per request that the tier could serve sooner."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from engine.cache.sequence import CachedSequence
from engine.tiers.copies.fetch import Prefill
from engine.tiers.fetches import LATE_S, LATE_SHARE
from engine.tiers.link import Link
from engine.tiers.stores.block_file import NO_DIGEST
from engine.tiers.stores.lookups import Lookup, Lookups
from engine.tiers.stores.stats import LookupEnd, TierStats

LOOKUP_SHARE = LATE_SHARE
"""A request waits for a look-up's answer for at most this share of its time to the first token without the blocks in
question, without the device's queue. A fetch's deadline counts from the same moment, so both together lose no more."""


@dataclass(slots=True, eq=False)
class _Open:
    lookup: Lookup
    first: int
    patience_s: float
    until_s: float = math.inf
    """The time on the clock until which the request waits; infinite before it waits."""


class Search:
    """Adds the blocks that look-ups find to the index of the shared tier's link, so that they can be fetched."""

    def __init__(self, link: Link, lookups: Lookups, clock: Callable[[], float], stats: TierStats) -> None:
        self._link, self._lookups, self._clock, self._stats = link, lookups, clock, stats
        self._open: dict[int, _Open] = {}
        self._since_s: dict[int, float] = {}
        """Request that was looked up -> when it could first have started; infinite: it could not yet."""

    def begin(self, request_id: int, sequence: CachedSequence, known: int, stop: int, known_s: float) -> None:
        """Look up the blocks `known` .. `stop - 1` of a request. Without them it takes `known_s` seconds, in addition
        to the device's queue."""
        self._since_s[request_id] = math.inf
        parent = sequence.digests[known - 1] if known else NO_DIGEST
        lookup = self._lookups.ask(sequence.digests[known:stop], parent)
        if lookup is None:
            self._stats.lookups[LookupEnd.REFUSED] += 1
            return
        self._open[request_id] = _Open(lookup, known, max(LATE_S, LOOKUP_SHARE * known_s))

    def has_begun(self, request_id: int) -> bool:
        """Whether the request's look-up has begun or has ended."""
        return request_id in self._since_s

    def waits(self, request_id: int, sequence: CachedSequence, prefill: Prefill) -> bool:
        """Whether the request, which could start now, should wait for the answer. Once the answer is there, the index
        has what was found. A wait that would last until a step of other requests ends is hardly ever worthwhile.
        """
        if request_id in self._since_s:
            self._since_s[request_id] = min(self._since_s[request_id], self._clock())
        asked = self._open.get(request_id)
        if asked is None:
            return False
        found = asked.lookup.found()
        asked.until_s = min(asked.until_s, self._since_s[request_id] + prefill.queue_s + asked.patience_s)
        if found is None and self._clock() + prefill.next_s < asked.until_s:
            return True
        del self._open[request_id]
        if found is None:
            asked.lookup.cancel()
            self._stats.lookups[LookupEnd.LATE] += 1
        elif found:
            self._stats.lookups[LookupEnd.FOUND] += 1
            self._link.learn(sequence, asked.first, asked.first + found)
        else:
            self._stats.lookups[LookupEnd.NOTHING] += 1
        return False

    def waited_since_s(self, request_id: int) -> float:
        """Return when the request began to wait: now, if it was not looked up."""
        return min(self._since_s.get(request_id, math.inf), self._clock())

    def late_at_s(self) -> list[float]:
        """Return the times at which requests stop waiting, without those that have passed.

        `waits` is not called for a request while one before it does not fit, and a past time would keep the loop busy.
        """
        now_s = self._clock()
        return [asked.until_s for asked in self._open.values() if asked.until_s > now_s]

    def forget(self, request_id: int) -> None:
        """Forget a request that has started or has left."""
        self._since_s.pop(request_id, None)
        if (asked := self._open.pop(request_id, None)) is not None:
            asked.lookup.cancel()
