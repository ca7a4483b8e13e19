"""The tiers below the pool, as the scheduler sees them (`engine.sched.tiers.LowerTiers`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from engine.backend.tiers.base import Direction, FinishedCopy
from engine.backend.tiers.fetch import Held, Prefill
from engine.cache.changes import KeyChanges
from engine.cache.prefix_cache import PrefixCache
from engine.cache.sequence import CachedSequence
from engine.contract.events import Keys
from engine.contract.fetch_costs import FetchCost, FetchCosts
from engine.contract.load import StepCost
from engine.tiers.fetches import Fetch, plan
from engine.tiers.keys import TieredKeys
from engine.tiers.link import PAUSE_S, Link, leading
from engine.tiers.lookups import Lookups
from engine.tiers.place import Place
from engine.tiers.search import Search
from engine.tiers.stats import Decision, Outcome, SharedSize, TierSize, TierStats


class Shared(Protocol):
    """What a shared tier is beside its index and its copies."""

    @property
    def lookups(self) -> Lookups: ...
    def size(self) -> SharedSize:
        """What it holds."""
        ...

    def reset(self) -> None:
        """Forget everything. Does not wait."""
        ...


SPARE_SHARE = 1 / 16
"""Of the pool. With fewer blocks to be had, a request that ends gives its own back at once instead of copying them."""


class Tiers:
    """Copies down what requests leave behind, and brings up what requests find below the pool.

    Every tier is an index of its own over blocks of its own (`PrefixCache`), and holds the parents of what it holds.
    A copy's source and target are referenced in their tiers for as long as it is open. Nothing here waits; time comes
    from `clock`, in seconds that only grow.
    """

    def __init__(
        self,
        pool: PrefixCache,
        links: Sequence[Link],
        *,
        step_tokens: int,
        clock: Callable[[], float],
        poll_s: float = math.inf,
        shared: Shared | None = None,
    ) -> None:
        """`links`: from the pool downwards; `step_tokens`: that one step computes at most; `poll_s`: seconds after
        which copies under way are to be asked for, where nobody tells that they have ended; `shared`: of the last link,
        if other engines write there, too.
        """
        self._poll_s = poll_s
        self._pool = pool
        self._links = links
        self._step_tokens = step_tokens
        self._clock = clock
        self._cost = StepCost()
        # What is shared is not published: all pods reach it, and any of them may remove it.
        self._keys = TieredKeys([pool, *[link.lower for link in links if link.tier != Place.SHARED]])
        self._fetches: dict[int, Fetch] = {}
        """By request that waits."""
        self._fetched: dict[bytes, Fetch] = {}
        """By the digest of each block on its way."""
        self._left: list[Fetch] = []
        """Fetches that nobody waits for, with copies that have not ended."""
        self._decided: set[int] = set()
        """Requests that wait for blocks no more."""
        self._asked: set[int] = set()
        """Requests that are counted in `TierStats.query_tokens` and have not started."""
        self.stats = TierStats()
        self._shared = shared
        self._search = None if shared is None else Search(links[-1], shared.lookups, clock, self.stats)

    def learn_cost(self, cost: StepCost) -> None:
        """See `LowerTiers.learn_cost`. What an engine before has left holds until this one has learnt its own."""
        if cost.token_s:
            self._cost = cost

    @property
    def cost(self) -> StepCost:
        """What computing costs; all zero: not known yet."""
        return self._cost

    @property
    def is_busy(self) -> bool:
        """Whether a copy has not ended."""
        return any(link.is_busy for link in self._links)

    def check_in_s(self) -> float:
        """Seconds until copies must be looked at again, even if nothing is told of them: infinite without any."""
        late_at_s = min((fetch.late_at_s() for fetch in self._fetches.values()), default=math.inf)
        if self._search is not None:
            late_at_s = min([late_at_s, *self._search.late_at_s()])
        return max(0.0, min(late_at_s - self._clock(), self._poll_s if self.is_busy else math.inf))

    def poll(self) -> None:
        """See `LowerTiers.poll`."""
        for link in reversed(self._links):  # what has come up one tier goes on at once
            for end in link.poll():
                if end.error is not None:
                    self.stats.errors[link.tier] += 1
                    if end.direction is Direction.DEMOTE:
                        link.paused_until_s = self._clock() + PAUSE_S
                if end.direction is Direction.PROMOTE:
                    self.stats.promoted[link.tier] += len(end.done)
                else:
                    self.stats.demoted[link.tier] += len(end.done)
                    if link.spoilt:
                        link.spoilt.difference_update(pair.target for pair in end.done)
        for request_id, fetch in tuple(self._fetches.items()):
            if fetch.is_over:
                self._end(request_id, fetch)
        for fetch in self._left:
            fetch.release()
        self._left = [fetch for fetch in self._left if not fetch.is_over]

    def waits(
        self,
        request_id: int,
        sequence: CachedSequence,
        known_tokens: int,
        *,
        cached_blocks: int,
        fits: bool,
        reserve_blocks: int,
        queue_s: float,
    ) -> bool:
        """See `LowerTiers.waits`."""
        fetch = self._fetches.get(request_id)
        if fetch is not None:
            if not fetch.is_late(self._clock()):
                return True
            self._give_up(request_id, fetch)
            return False
        if request_id not in self._asked:
            self._asked.add(request_id)
            self._count_query(sequence, known_tokens, cached_blocks)
        if cached_blocks >= (known_tokens - 1) // self._pool.block_size:
            return False
        if sequence.digests[cached_blocks] in self._fetched:
            return True  # another request waits for it
        if not fits or request_id in self._decided:
            return False
        prefill = Prefill(known_tokens, cached_blocks * self._pool.block_size, self._step_tokens, self._cost, queue_s)
        if self._search is not None and self._searches(self._search, request_id, sequence, prefill, cached_blocks):
            return True
        if not any(link.holds(sequence, cached_blocks) for link in self._links):
            return False
        return self._begin(request_id, sequence, prefill, cached_blocks, reserve_blocks)

    def forget(self, request_id: int) -> None:
        """See `LowerTiers.forget`."""
        self._asked.discard(request_id)
        self._decided.discard(request_id)
        fetch = self._fetches.get(request_id)
        if fetch is not None:
            self._give_up(request_id, fetch)
            self._decided.discard(request_id)
        if self._search is not None:
            self._search.forget(request_id)

    def take_over(self, sequence: CachedSequence) -> None:
        """See `LowerTiers.take_over`."""
        if self._pool.pool.available < self._pool.pool.total * SPARE_SHARE or not self._pool.is_current(sequence):
            self._pool.release(sequence)
        else:
            self._store(0, sequence)

    def make_room(self) -> None:
        """See `LowerTiers.make_room`."""
        self._links[0].cancel_demotions()

    def fetch_costs(self) -> FetchCosts:
        """See `LowerTiers.fetch_costs`. Of a tier whose speed, or that of one above it, is not known: nothing."""
        found = dict.fromkeys(Place, FetchCost())
        path = Held(0, self._pool.block_size, 0.0, 0.0)
        for link in self._links:
            part = Held.measured(link.copier, 0, self._pool.block_size)
            if part is None:
                break
            path = part.behind(path)
            found[link.tier] = FetchCost(path.queue_s, path.block_s / self._pool.block_size)
        return FetchCosts(found[Place.HOST], found[Place.DISK], found[Place.SHARED])

    def reset(self) -> None:
        """See `LowerTiers.reset`. Copies under way end, and what they bring is not indexed."""
        for link in self._links:
            link.lower.reset()
        for request_id, fetch in tuple(self._fetches.items()):
            self._give_up(request_id, fetch)
        if self._shared is not None:
            self._shared.reset()

    def take_changes(self) -> KeyChanges:
        """See `LowerTiers.take_changes`."""
        if self._shared is not None:
            self._links[-1].lower.take_changes()  # nobody wants them, and they would pile up
        return self._keys.take_changes()

    def held_keys(self) -> tuple[Keys, Keys, Keys]:
        """See `LowerTiers.held_keys`."""
        return self._keys.held_keys()

    def sizes(self) -> list[TierSize]:
        """The tiers as they are, the pool left out."""
        return [
            TierSize(
                link.tier, link.lower.pool.total, link.lower.indexed_blocks, link.block_bytes, link.lower.evictions
            )
            for link in self._links
        ]

    def shared_size(self) -> SharedSize | None:
        """The shared tier as it is known; None: there is none."""
        return None if self._shared is None else self._shared.size()

    def bytes_per_s(self, tier: Place) -> float | None:
        """The measured rate from the tier to the one above it; None: not known, or there is no such tier."""
        return next((link.copier.bytes_per_s(Direction.PROMOTE) for link in self._links if link.tier == tier), None)

    def _begin(
        self, request_id: int, sequence: CachedSequence, prefill: Prefill, hits: int, reserve_blocks: int
    ) -> bool:
        """Decide, and fetch where that is sooner."""
        held = self._held(sequence, prefill.prompt_tokens - 1, hits)
        if not any(part.blocks for part in held):
            return False
        self._decided.add(request_id)
        choice = plan(prefill, held)
        fetch = None
        if choice.fetched_blocks:
            since_s = self._clock() if self._search is None else self._search.waited_since_s(request_id)
            fetch = self._hold(sequence, hits + choice.fetched_blocks, reserve_blocks, prefill, since_s)
        if fetch is None:
            self.stats.decisions[Decision.COMPUTE] += 1
            return False
        is_all = fetch.stop == hits + sum(part.blocks for part in held)
        self.stats.decisions[Decision.FETCH if is_all else Decision.PART] += 1
        self._fetches[request_id] = fetch
        for digest in sequence.digests[fetch.first : fetch.stop]:
            self._fetched[digest] = fetch
        return True

    def _searches(self, search: Search, request_id: int, sequence: CachedSequence, prefill: Prefill, hits: int) -> bool:
        """Whether the request waits for what the shared tier says of it: asked once, where it would be sooner fetched
        if all of it were there."""
        if search.has_begun(request_id):
            return search.waits(request_id, sequence)
        stop = (prefill.prompt_tokens - 1) // self._pool.block_size
        held = self._held(sequence, prefill.prompt_tokens - 1, hits)
        if len(held) < len(self._links):  # the way up is not known
            return False
        known = hits + sum(part.blocks for part in held)
        possible = [*held[:-1], replace(held[-1], blocks=held[-1].blocks + stop - known)]
        if known >= stop or plan(prefill, possible).fetched_blocks <= known - hits:
            return False
        return search.begin(request_id, sequence, prefill, known, stop)

    def _held(self, sequence: CachedSequence, tokens: int, hits: int) -> list[Held]:
        """What each tier has behind the `hits` blocks of the pool and those of the tiers above it."""
        held: list[Held] = []
        reached, path = hits, Held(0, self._pool.block_size, 0.0, 0.0)
        for link in self._links:
            readable, is_spoilt = link.readable_blocks(sequence, tokens)
            part = Held.measured(link.copier, max(0, readable - reached), self._pool.block_size)
            if part is None:  # not measured yet: whatever lies deeper has to come this way, too
                break
            path = part.behind(path)
            held.append(path)
            reached = max(reached, readable)
            if is_spoilt:
                break
        return held

    def _hold(
        self, sequence: CachedSequence, stop: int, reserve_blocks: int, prefill: Prefill, since_s: float
    ) -> Fetch | None:
        """Begin to fetch up to block `stop`, for a request that waits since `since_s`; None where the tiers have no
        room."""
        for depth, link in enumerate(self._links):  # noqa: B007
            readable, is_spoilt = link.readable_blocks(sequence, stop * self._pool.block_size)
            if readable >= stop:
                break
            if is_spoilt:
                return None
        else:
            return None
        links = self._links[: depth + 1]
        sequences: list[CachedSequence] = []
        present: list[int] = []
        for cache in [self._pool, *[link.lower for link in links]]:
            part = sequence.fork()
            # The pool counts the use when the request starts.
            is_pool = cache is self._pool
            had = cache.hold(part, stop, reserve_blocks if is_pool else 0, counts_use=not is_pool)
            if had is None:
                for other, held in zip([self._pool, *[link.lower for link in links]], sequences, strict=False):
                    other.release(held)
                return None
            sequences.append(part)
            present.append(had)
        fetch = Fetch(prefill, since_s, links, sequences, present[0], stop)
        fetch.begin(present)
        return fetch

    def _end(self, request_id: int, fetch: Fetch) -> None:
        """All that could come has come: the request finds it in the pool."""
        del self._fetches[request_id]
        self._forget_digests(fetch)
        self._decided.add(request_id)
        fetch.release()
        whole = fetch.first + fetch.landed >= fetch.stop
        self.stats.outcomes[Outcome.ARRIVED if whole else Outcome.FAILED] += 1
        self._count_hits(fetch)

    def _give_up(self, request_id: int, fetch: Fetch) -> None:
        """The request waits no more. What has come can be used; what copies still write is held until they end."""
        del self._fetches[request_id]
        self._forget_digests(fetch)
        self._decided.add(request_id)
        self.stats.outcomes[Outcome.GIVEN_UP] += 1
        self._count_hits(fetch)
        fetch.give_up()
        fetch.release()
        self._left.append(fetch)

    def _forget_digests(self, fetch: Fetch) -> None:
        for digest in fetch.sequences[0].digests[fetch.first : fetch.stop]:
            if self._fetched.get(digest) is fetch:
                del self._fetched[digest]

    def _count_query(self, sequence: CachedSequence, known_tokens: int, cached_blocks: int) -> None:
        """What each tier is asked for: all but what is above it."""
        size, reached = self._pool.block_size, cached_blocks
        most = (known_tokens - 1) // size
        for link in self._links:
            self.stats.query_tokens[link.tier] += known_tokens - reached * size
            if reached < most and link.holds(sequence, reached):
                reached = len(link.lower.find(sequence, most))

    def _count_hits(self, fetch: Fetch) -> None:
        for link, blocks in zip(fetch.links, fetch.landed_from(), strict=True):
            self.stats.hit_tokens[link.tier] += blocks * self._pool.block_size

    def _store(self, depth: int, sequence: CachedSequence) -> None:
        """Copy a held sequence one tier down, what is worth it; then release it, and go on from there."""
        upper = self._links[depth - 1].lower if depth else self._pool
        if depth == len(self._links):
            upper.release(sequence)
            return
        link = self._links[depth]
        wanted = link.worthwhile(sequence, self._cost)
        part = sequence.fork()
        there = len(link.lower.find(part, len(sequence.nodes)))
        self.stats.worthless[link.tier] += max(0, len(sequence.nodes) - max(wanted, there))
        # Those there already are held, too: so their tier learns that they were used.
        fits = min(max(wanted, there), there + (link.lower.pool.available if link.has_room(self._clock()) else 0))
        present = link.lower.hold(part, fits)
        if present is None:  # those there are idle, and count among the available
            fits, present = there, link.lower.hold(part, there)
        self.stats.skipped[link.tier] += max(0, wanted - fits)
        if present is None:
            upper.release(sequence)
            return
        repairs, missing = link.pairs_down(sequence, part, present)
        if not repairs and not missing:
            upper.release(sequence)
            self._store(depth + 1, part)
            return
        size = self._pool.block_size

        def ended(end: FinishedCopy) -> None:
            link.lower.commit(part, (present + leading(missing, end)) * size)
            upper.release(sequence)
            self._store(depth + 1, part)

        link.copy(Direction.DEMOTE, [*repairs, *missing], ended)
