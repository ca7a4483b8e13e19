"""What a shared tier holds of a request's prompt: looked up once for each request that it could serve sooner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.backend.tiers.fetch import Prefill, compute_s
from engine.cache.sequence import CachedSequence
from engine.tiers.block_file import NO_DIGEST
from engine.tiers.fetches import LATE_S, LATE_SHARE
from engine.tiers.link import Link
from engine.tiers.lookups import Lookup, Lookups
from engine.tiers.stats import LookupEnd, TierStats

LOOKUP_SHARE = LATE_SHARE
"""An answer is waited for as long as that share of what computing everything takes, beside the device's queue. A fetch
that follows is late by the time since the question, so both together lose no more than either."""


@dataclass(slots=True, eq=False)
class _Open:
    lookup: Lookup
    first: int
    since_s: float
    until_s: float


class Search:
    """Keeps the index of the shared tier's link: what was found there can be fetched from then on."""

    def __init__(self, link: Link, lookups: Lookups, clock: Callable[[], float], stats: TierStats) -> None:
        self._link, self._lookups, self._clock, self._stats = link, lookups, clock, stats
        self._open: dict[int, _Open] = {}
        self._since_s: dict[int, float] = {}
        """By request that was looked up: when it began to wait."""

    def begin(self, request_id: int, sequence: CachedSequence, prefill: Prefill, known: int, stop: int) -> bool:
        """Look for the blocks `known` .. `stop - 1`; whether the request waits for that."""
        now_s = self._clock()
        self._since_s[request_id] = now_s
        parent = sequence.digests[known - 1] if known else NO_DIGEST
        lookup = self._lookups.ask(sequence.digests[known:stop], parent)
        if lookup is None:
            self._stats.lookups[LookupEnd.REFUSED] += 1
            return False
        most_s = max(LATE_S, LOOKUP_SHARE * compute_s(prefill, prefill.cached_tokens))
        self._open[request_id] = _Open(lookup, known, now_s, now_s + prefill.queue_s + most_s)
        return self.waits(request_id, sequence)

    def has_begun(self, request_id: int) -> bool:
        """Whether the request was looked up, or is being."""
        return request_id in self._since_s

    def waits(self, request_id: int, sequence: CachedSequence) -> bool:
        """Whether the answer is still waited for. Once it is there, the index has what was found."""
        asked = self._open.get(request_id)
        if asked is None:
            return False
        found = asked.lookup.found()
        if found is None and self._clock() < asked.until_s:
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
        """When the request began to wait: now, if it was not looked up."""
        return self._since_s.get(request_id, self._clock())

    def late_at_s(self) -> list[float]:
        """When each request that waits stops waiting."""
        return [asked.until_s for asked in self._open.values()]

    def forget(self, request_id: int) -> None:
        """The request has started or has left."""
        self._since_s.pop(request_id, None)
        if (asked := self._open.pop(request_id, None)) is not None:
            asked.lookup.cancel()
