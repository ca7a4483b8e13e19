"""The tiers below the pool, as the scheduler sees them (`engine.sched.tiers.LowerTiers`)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Protocol

from engine.cache.changes import KeyChanges
from engine.cache.prefix_cache import PrefixCache
from engine.cache.sequence import CachedSequence
from engine.contract.events import Keys
from engine.contract.fetch_costs import FetchCost, FetchCosts, is_worth_it
from engine.contract.load import StepCost
from engine.tiers.allowance import Allowance, StepSharing
from engine.tiers.copies.base import Direction
from engine.tiers.copies.fetch import Held, Prefill
from engine.tiers.fetches import Fetch, Wanted, plan
from engine.tiers.health import TierHealth
from engine.tiers.keys import TieredKeys
from engine.tiers.leaving import Leaving
from engine.tiers.link import PAUSE_S, Link
from engine.tiers.search import Search
from engine.tiers.stores.lookups import Lookups
from engine.tiers.stores.place import Place
from engine.tiers.stores.stats import Decision, Outcome, SharedSize, TierSize, TierStats


class Shared(Protocol):
    """The part of a shared tier besides its index and its copies."""

    @property
    def lookups(self) -> Lookups: ...
    def size(self) -> SharedSize:
        """Return what the tier holds."""
        ...

    def reset(self) -> None:
        """Forget everything. Does not wait."""
        ...


SPARE_SHARE = 1 / 16
"""Share of the pool. If fewer blocks are available, a request that ends gives its blocks back without copying them."""


class Tiers:
    """Copies down what requests leave behind, and brings up what requests find below the pool.

    Every tier is a separate index over its own blocks (`PrefixCache`), and holds the parents of what it holds. A copy's
    source and target are referenced in their tiers while it is open. Nothing here waits; time comes from `clock`, in
    seconds that only grow.
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
        sharing: StepSharing | None = None,
    ) -> None:
        """`links`: from the pool downwards; `step_tokens`: most tokens that one step computes; `poll_s`: seconds
        between polls of copies that do not report their end; `shared`: the rest of the last link's tier, if other
        engines write there, too; `sharing`: with the steps of other requests.
        """
        sharing = sharing or StepSharing()
        self._allowance = Allowance(sharing.share, sharing.computed or clock)
        self._poll_s = poll_s
        self._later = sharing.later
        self._pool = pool
        self._links = links
        self._health = {link.tier: TierHealth(link.tier, clock) for link in links}
        self._step_tokens = step_tokens
        self._clock = clock
        self._cost = StepCost()
        self._least_s = 0.0
        # The shared tier's keys are not published: all pods reach it, and any of them may remove blocks.
        self._keys = TieredKeys([pool, *[link.lower for link in links if link.tier != Place.SHARED]])
        self._fetches: dict[int, Fetch] = {}
        """Waiting request -> its fetch."""
        self._wanted: dict[int, Wanted] = {}
        """Waiting request -> what is fetched once the step that is being planned has begun, in order of arrival."""
        self._wanted_blocks = [0] * len(links)
        """By link: blocks that `_wanted` will ask it for."""
        self._fetched: dict[bytes, Fetch | Wanted] = {}
        """Digest of a block that is on its way or soon will be -> its fetch."""
        self._left: list[Fetch] = []
        """Fetches that no request waits for, with copies that have not ended."""
        self._leaving: list[Leaving] = []
        """Sequences on their way down for which something is to be done, oldest first."""
        self._copying: dict[Leaving, None] = {}
        """Sequences on their way down that wait for a copy to end. There may be hundreds, so no step walks them."""
        self._decided: set[int] = set()
        """Requests for which it was decided whether to fetch. The decision is made only once."""
        self._asked: set[int] = set()
        """Requests that are counted in `TierStats.query_tokens` but have not started."""
        self.stats = TierStats()
        self._shared = shared
        self._search = None if shared is None else Search(links[-1], shared.lookups, clock, self.stats)

    def learn_cost(self, cost: StepCost, least_s: float = 0.0) -> None:
        """See `LowerTiers.learn_cost`. Until this engine has learnt a cost, the one that an earlier engine left is
        used."""
        if cost.token_s:
            self._cost, self._least_s = cost, least_s

    @property
    def cost(self) -> StepCost:
        """What computing costs; all zero: not known yet."""
        return self._cost

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way, or will be as soon as it may begin."""
        return bool(self._leaving or self._copying or self._fetches or self._wanted) or any(
            link.is_busy for link in self._links
        )

    def check_in_s(self) -> float:
        """Return the seconds until a copy must be polled or a fetch or look-up is late; infinite if there is none."""
        late_at_s = min((fetch.late_at_s() for fetch in self._fetches.values()), default=math.inf)
        if self._search is not None:
            late_at_s = min([late_at_s, *self._search.late_at_s()])
        return max(0.0, min(late_at_s - self._clock(), self._poll_s if self.is_busy else math.inf))

    def begin_step(self, others_s: float) -> None:
        """See `LowerTiers.begin_step`."""
        self._allowance.begin_step(others_s)
        if self._hides and (self._wanted or self._leaving):
            assert self._later is not None
            self._later()

    @property
    def _hides(self) -> bool:
        """Whether copies begin while steps run, not while they are planned, so that other requests do not wait."""
        return self._later is not None and self._allowance.is_bounded

    def go_on(self) -> None:
        """Begin what may begin, and process copies that have ended. Call this while a step runs, or while nothing
        runs. The allowance bounds the copies downwards; those beyond it begin with the next step."""
        self._take_in_all()
        self._go_down()

    def poll(self, *, is_idle: bool = False) -> None:
        """See `LowerTiers.poll`."""
        if is_idle:
            self._allowance.begin_step(0.0)
        self._take_in_all()
        if not self._hides:
            self._go_down()

    def _take_in_all(self) -> None:
        for link in reversed(self._links):  # the deepest first, so that what has come up one tier goes on at once
            self._take_in(link)
        self._begin_wanted()
        for request_id, fetch in tuple(self._fetches.items()):
            if fetch.is_over:
                self._end(request_id, fetch)
            elif fetch.late_at_s() <= self._clock():  # `waits` is not asked while an earlier request does not fit
                self._give_up(request_id, fetch)
        for fetch in self._left:
            fetch.release()
        self._left = [fetch for fetch in self._left if not fetch.is_over]

    def expect(self, request_id: int, sequence: CachedSequence, known_tokens: int, *, cached_blocks: int) -> None:
        """See `LowerTiers.expect`."""
        if self._search is not None and cached_blocks < (known_tokens - 1) // self._pool.block_size:
            cached = cached_blocks * self._pool.block_size
            prefill = Prefill(known_tokens, cached, self._step_tokens, self._cost, least_s=self._least_s)
            self._ask(self._search, request_id, sequence, prefill, cached_blocks)

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
        pace_s: tuple[float, float],
    ) -> bool:
        """See `LowerTiers.waits`."""
        fetch = self._fetches.get(request_id)
        if fetch is not None:
            if not fetch.is_late(self._clock(), pace_s):
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
        cached = cached_blocks * self._pool.block_size
        prefill = Prefill(known_tokens, cached, self._step_tokens, self._cost, queue_s, *pace_s, self._least_s)
        if self._search is not None:
            self._ask(self._search, request_id, sequence, prefill, cached_blocks)
            if self._search.waits(request_id, sequence, prefill):
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
        elif request_id in self._wanted:
            self._take_wanted(request_id)
        if self._search is not None:
            self._search.forget(request_id)

    def take_over(self, sequence: CachedSequence) -> None:
        """See `LowerTiers.take_over`."""
        if self._pool.pool.available < self._pool.pool.total * SPARE_SHARE or not self._pool.is_current(sequence):
            self._pool.release(sequence)
        else:
            self._store(0, sequence)
            if not self._hides:
                self._go_down()

    def make_room(self) -> bool:
        """See `LowerTiers.make_room`."""
        before = self._pool.pool.available
        self._links[0].cancel_demotions()
        for leaving in (*self._leaving, *self._copying):
            if not leaving.depth:
                leaving.cut_short()
        self._take_in(self._links[0])
        self._go_down()
        return self._pool.pool.available > before

    @property
    def holds_blocks(self) -> bool:
        """See `LowerTiers.holds_blocks`."""
        leaving = any(not leaving.depth for leaving in (*self._leaving, *self._copying))
        return leaving or any(fetch.holds_pool for fetch in (*self._fetches.values(), *self._left))

    def fetch_costs(self) -> FetchCosts:
        """See `LowerTiers.fetch_costs`. If the speed of a tier or of one above it is not known, its cost is empty."""
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
            link.reset()
        for leaving in (*self._leaving, *self._copying):
            leaving.cut_short()
        for request_id, fetch in tuple(self._fetches.items()):
            self._give_up(request_id, fetch)
        for request_id in tuple(self._wanted):
            self._take_wanted(request_id)
        if self._shared is not None:
            self._shared.reset()

    def take_changes(self) -> KeyChanges:
        """See `LowerTiers.take_changes`."""
        if self._shared is not None:
            self._links[-1].lower.take_changes()  # not published, and they would pile up
        return self._keys.take_changes()

    def held_keys(self) -> tuple[Keys, Keys, Keys]:
        """See `LowerTiers.held_keys`."""
        return self._keys.held_keys()

    def sizes(self) -> list[TierSize]:
        """Return the present sizes of the tiers below the pool."""
        return [
            TierSize(
                link.tier, link.lower.pool.total, link.lower.indexed_blocks, link.block_bytes, link.lower.evictions
            )
            for link in self._links
        ]

    def shared_size(self) -> SharedSize | None:
        """Return the size of the shared tier as far as is known; None: there is no shared tier."""
        return None if self._shared is None else self._shared.size()

    def bytes_per_s(self, tier: Place) -> float | None:
        """Return the measured rate from the tier to the one above it; None: not known, or there is no such tier."""
        return next((link.copier.bytes_per_s(Direction.PROMOTE) for link in self._links if link.tier == tier), None)

    def _begin(
        self, request_id: int, sequence: CachedSequence, prefill: Prefill, hits: int, reserve_blocks: int
    ) -> bool:
        """Decide whether to fetch, and fetch if that is sooner. Return whether the request waits."""
        held = self._held(sequence, prefill.prompt_tokens - 1, hits)
        if not any(part.blocks for part in held):
            return False
        self._decided.add(request_id)
        choice = plan(prefill, held)
        if not choice.fetched_blocks:
            self.stats.decisions[Decision.COMPUTE] += 1
            return False
        since_s = self._clock() if self._search is None else self._search.waited_since_s(request_id)
        wanted = Wanted(sequence, hits, hits + choice.fetched_blocks, reserve_blocks, prefill, since_s, held)
        if self._later is None or not prefill.next_s:
            return self._fetch(request_id, wanted)
        self._wanted[request_id] = wanted  # `begin_step` follows, because others are computed
        self._note_digests(wanted)
        for depth, blocks in enumerate(wanted.blocks_by_link):
            self._wanted_blocks[depth] += blocks
        return True

    def _begin_wanted(self) -> None:
        """Begin what was decided while a step was planned."""
        for request_id in tuple(self._wanted):
            self._fetch(request_id, self._take_wanted(request_id))

    def _take_wanted(self, request_id: int) -> Wanted:
        """Remove and return what was decided for the request."""
        wanted = self._wanted.pop(request_id)
        self._forget_digests(wanted)
        for depth, blocks in enumerate(wanted.blocks_by_link):
            self._wanted_blocks[depth] -= blocks
        return wanted

    def _fetch(self, request_id: int, wanted: Wanted) -> bool:
        """Begin to fetch; return False if the tiers have no room."""
        fetch = wanted.begin(self._pool, self._links, self._allowance.piece_blocks)
        if fetch is None:
            self.stats.decisions[Decision.COMPUTE] += 1
            return False
        self.stats.decisions[Decision.FETCH if wanted.is_all else Decision.PART] += 1
        self._fetches[request_id] = fetch
        self._note_digests(fetch)
        return True

    def _ask(self, search: Search, request_id: int, sequence: CachedSequence, prefill: Prefill, hits: int) -> None:
        """Look up the request in the shared tier, once, if it would start sooner with all of its prompt there than with
        what is known to be there."""
        if search.has_begun(request_id):
            return
        stop = (prefill.prompt_tokens - 1) // self._pool.block_size
        held = self._held(sequence, prefill.prompt_tokens - 1, hits)
        if len(held) < len(self._links):  # a link is not measured yet, or a spoilt block is in the way
            return
        known = hits + sum(part.blocks for part in held)
        if known < stop:
            possible = [*held[:-1], replace(held[-1], blocks=held[-1].blocks + stop - known)]
            known_s = plan(prefill, held).first_token_s
            if is_worth_it(plan(prefill, possible).first_token_s, known_s):
                search.begin(request_id, sequence, known, stop, known_s - prefill.queue_s)

    def _held(self, sequence: CachedSequence, tokens: int, hits: int) -> list[Held]:
        """Return what each tier holds behind the `hits` blocks of the pool and those of the tiers above it."""
        held: list[Held] = []
        reached, path = hits, Held(0, self._pool.block_size, 0.0, 0.0)
        for link, ahead in zip(self._links, self._wanted_blocks, strict=True):
            readable, is_spoilt = link.readable_blocks(sequence, tokens)
            part = Held.measured(link.copier, max(0, readable - reached), self._pool.block_size, ahead)
            if part is None:  # not measured yet: whatever lies deeper has to come this way, too
                break
            path = part.behind(path)
            held.append(path)
            reached = max(reached, readable)
            if is_spoilt:
                break
        return held

    def _end(self, request_id: int, fetch: Fetch) -> None:
        """End a fetch that has brought all it could: the request finds the blocks in the pool."""
        del self._fetches[request_id]
        self._forget_digests(fetch)
        self._decided.add(request_id)
        fetch.release()
        whole = fetch.first + fetch.landed >= fetch.stop
        self.stats.outcomes[Outcome.ARRIVED if whole else Outcome.FAILED] += 1
        self._count_hits(fetch)

    def _give_up(self, request_id: int, fetch: Fetch) -> None:
        """Give up a fetch. What has arrived can be used; blocks that copies still write are held until they end."""
        del self._fetches[request_id]
        self._forget_digests(fetch)
        self._decided.add(request_id)
        self.stats.outcomes[Outcome.GIVEN_UP] += 1
        self._count_hits(fetch)
        fetch.give_up()
        fetch.release()
        self._left.append(fetch)

    def _note_digests(self, fetch: Fetch | Wanted) -> None:
        self._fetched.update(dict.fromkeys(fetch.digests, fetch))

    def _forget_digests(self, fetch: Fetch | Wanted) -> None:
        for digest in fetch.digests:
            if self._fetched.get(digest) is fetch:
                del self._fetched[digest]

    def _count_query(self, sequence: CachedSequence, known_tokens: int, cached_blocks: int) -> None:
        """Count what each tier is asked for: all tokens except those that tiers above it hold."""
        size, reached = self._pool.block_size, cached_blocks
        most = (known_tokens - 1) // size
        for link in self._links:
            self.stats.query_tokens[link.tier] += known_tokens - reached * size
            if reached < most and link.holds(sequence, reached):
                reached = len(link.lower.find(sequence, most))

    def _count_hits(self, fetch: Fetch) -> None:
        for link, blocks in zip(fetch.links, fetch.landed_from(), strict=True):
            self.stats.hit_tokens[link.tier] += blocks * self._pool.block_size

    def _take_in(self, link: Link) -> None:
        """Process the copies over this link that have ended."""
        self._health[link.tier].check(is_busy=link.is_busy)
        for end in link.poll():
            with self._allowance.spending() if end.direction is Direction.DEMOTE else nullcontext():
                link.end(end)
            self._health[link.tier].ended(end.direction, end.error, moved=bool(end.done))
            if end.error is not None:
                self.stats.errors[link.tier] += 1
                if end.direction is Direction.DEMOTE:
                    link.paused_until_s = self._clock() + PAUSE_S
            moved = self.stats.promoted if end.direction is Direction.PROMOTE else self.stats.demoted
            moved[link.tier] += len(end.done)
            if end.direction is Direction.DEMOTE and link.spoilt:
                link.spoilt.difference_update(pair.target for pair in end.done)

    def _go_down(self) -> None:
        """Begin copies of more blocks that go down, and release what has been copied."""
        going, self._leaving = deque(self._leaving), []
        while going:
            leaving, kept = going.popleft(), len(self._leaving)
            if leaving.part is None and not leaving.is_cut and self._allowance.is_left:
                with self._allowance.spending():
                    leaving.begin(self._cost)
            while leaving.part is not None and leaving.unasked and self._allowance.is_left:
                with self._allowance.spending():
                    asked = leaving.unasked
                    if self._allowance.is_bounded:
                        asked = min(asked, self._allowance.piece_blocks)
                    leaving.go_on(asked)
                    self._allowance.move(asked, leaving.link.beside_s(Direction.DEMOTE))
            if leaving.is_over:
                with self._allowance.spending():
                    self._has_gone_down(leaving)
                going.extend(self._leaving[kept:])  # to the next tier at once: there may be no later call
                del self._leaving[kept:]
            elif leaving.is_asked:
                self._copying[leaving] = None
            else:
                self._leaving.append(leaving)

    def _has_gone_down(self, leaving: Leaving) -> None:
        self.stats.skipped[leaving.link.tier] += leaving.lacked
        self.stats.worthless[leaving.link.tier] += leaving.worthless
        leaving.release()
        if leaving.part is None:
            return
        if leaving.link.lower.is_current(leaving.part):
            self._store(leaving.depth + 1, leaving.part)
        else:
            leaving.link.lower.release(leaving.part)

    def _store(self, depth: int, sequence: CachedSequence) -> None:
        """Copy the worthwhile blocks of a held sequence one tier down, then release it. After that, the copy goes
        further down in the same way."""
        upper = self._links[depth - 1].lower if depth else self._pool
        if depth == len(self._links):
            upper.release(sequence)
        else:
            link = self._links[depth]
            has_room, spoilt = link.has_room(self._clock()), self._links[depth - 1].spoilt if depth else frozenset()
            self._leaving.append(
                Leaving(depth, link, upper, sequence, has_room=has_room, spoilt=spoilt, landed=self._landed)
            )

    def _landed(self, leaving: Leaving) -> None:
        """Look at these blocks with the next `_go_down`, because one of their copies has ended."""
        if leaving in self._copying:
            del self._copying[leaving]
            self._leaving.append(leaving)
