"""One request's blocks on their way up, and whether waiting for them is still faster than computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.cache.prefix_cache import PrefixCache
from engine.cache.sequence import CachedSequence
from engine.contract.fetch_costs import is_worth_it
from engine.tiers.copies.base import BlockPair, Direction, FinishedCopy
from engine.tiers.copies.fetch import FetchChoice, Held, Prefill, choose, compute_s
from engine.tiers.link import Link, leading

PIECES = 32
"""A fetch arrives in about this many pieces. Nothing is gained before the first piece is there, so pieces are small."""
LEAST_PIECE_S = 0.0001
"""Least seconds that a piece takes, because each piece costs the planning thread some 20 us at any size. Less than
`LATE_S`, within which a piece has to arrive."""
LATE_SHARE, LATE_S = 0.04, 0.0002
"""A fetch is given up once its request has lost this share of the time to compute everything, and at least `LATE_S`."""


def plan(prefill: Prefill, held: Sequence[Held]) -> FetchChoice:
    """Return how many of the blocks of all tiers to fetch. `held`: by tier; its blocks follow the previous tier's.

    The tiers are read at the same time. So a block of a slower tier can be used once it has arrived from that tier and
    the faster tiers' blocks have arrived, too.
    """
    best: FetchChoice | None = None
    taken, ready_s, cached = 0, 0.0, prefill.cached_tokens
    recompute_s = prefill.queue_s + compute_s(prefill, cached)
    for part in held:
        behind = replace(prefill, cached_tokens=cached, queue_s=prefill.begins_s(ready_s))
        choice = choose(behind, part)
        if choice.fetched_blocks and (best is None or choice.first_token_s < best.first_token_s):
            best = FetchChoice(taken + choice.fetched_blocks, choice.first_token_s, recompute_s)
        ready_s = max(ready_s, part.queue_s + part.blocks * part.block_s)
        taken += part.blocks
        cached += part.blocks * part.block_tokens
    if best is None or not is_worth_it(best.first_token_s, recompute_s):
        return FetchChoice(0, recompute_s, recompute_s)
    return best


@dataclass(slots=True, eq=False)
class Fetch:
    """Fills the pool's blocks `first` .. `stop - 1` of a sequence from the tiers below.

    It holds the sequence's blocks in every tier that takes part, as requests hold theirs in the pool: none is evicted
    while a copy reads or writes it.
    """

    prefill: Prefill
    """The request's prefill; `cached_tokens` as of the beginning of the fetch."""
    started_s: float
    lag_s: float
    """Seconds from the beginning until the copies asked for earlier have ended. Nothing lands sooner."""
    links: Sequence[Link]
    """The links that take part, from the pool downwards."""
    sequences: list[CachedSequence]
    """The holding sequence in the pool, and one for the lower tier of each link."""
    first: int
    stop: int
    least_piece: int
    """Least number of blocks of a piece."""
    landed: int = 0
    """Number of blocks, from `first` on, that are indexed in the pool."""
    is_given_up: bool = False
    has_failed: bool = False
    _arrived: list[dict[int, int]] = field(default_factory=list)
    """By link: first block -> stop of each piece that is in the upper tier and waits for a piece before it."""
    _present: Sequence[int] = ()
    """By tier, the pool first: the number of blocks that it held before the fetch."""
    _committed: list[int] = field(default_factory=list)
    """By link: the upper tier holds the blocks before this one."""
    _released: set[int] = field(default_factory=set)
    """Tiers in which nothing is held any more."""
    _copies: dict[tuple[int, int], None] = field(default_factory=dict)
    """Link and id of open copies."""

    def begin(self, present: Sequence[int]) -> None:
        """Ask for all pieces; `present`: by tier, the pool first, the number of blocks that it held before."""
        self._present = present
        self._arrived = [{} for _ in self.links]
        self._committed = list(present[: len(self.links)])
        for depth, link in enumerate(self.links):
            bytes_per_s = link.copier.bytes_per_s(Direction.PROMOTE) or 0.0
            least = max(self.least_piece, int(LEAST_PIECE_S * bytes_per_s / link.block_bytes))
            length = max(least, -(-(self.stop - self.first) // PIECES))
            # Includes blocks that the pool has but a tier in between lacks: a tier holds the parents of its blocks.
            start, end = present[depth], min(present[depth + 1], self.stop)
            while start < end:
                self._copy(depth, start, stop := min(start + length, end))
                start = stop

    @property
    def is_over(self) -> bool:
        """Whether no copy is open."""
        return not self._copies

    @property
    def holds_pool(self) -> bool:
        """Whether it holds blocks of the pool."""
        return 0 not in self._released

    @property
    def landed_tokens(self) -> int:
        """Number of leading tokens of the prompt whose KV is in the pool."""
        return (self.first + self.landed) * self.block_size

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.links[0].upper.block_size

    def landed_from(self) -> list[int]:
        """Return by link the number of blocks that have landed in the pool and came from the link's lower tier."""
        here, bounds = self.first + self.landed, self._present
        reached = [min(max(blocks, self.first), here) for blocks in bounds]
        for i in range(1, len(reached)):
            reached[i] = max(reached[i], reached[i - 1])
        return [reached[i + 1] - reached[i] for i in range(len(self.links))]

    def is_late(self, now_s: float, pace_s: tuple[float, float]) -> bool:
        """Whether to give the fetch up: the request has lost by waiting, or will lose by waiting longer.

        `pace_s`: pace of the steps of others, see `LowerTiers.waits`.
        """
        if now_s >= self.late_at_s():
            return True
        rest_s = compute_s(self.prefill, self.landed_tokens)
        device_s = max(0.0, self.started_s + self.prefill.queue_s - now_s)
        now = replace(self.prefill, queue_s=device_s, next_s=pace_s[0], further_s=pace_s[1])
        continued_s = now.begins_s(self._to_come_s()) + compute_s(self.prefill, self.stop * self.block_size)
        return continued_s > device_s + rest_s + LATE_S

    def late_at_s(self) -> float:
        """Return the time, on the clock of `started_s`, from which on waiting and computing the rest takes too long.

        The measure is the time for computing everything. The wait for earlier copies was known and does not count.
        """
        all_s, rest_s = compute_s(self.prefill, self.prefill.cached_tokens), compute_s(self.prefill, self.landed_tokens)
        slack_s = max(LATE_S, LATE_SHARE * all_s)
        return self.started_s + max(self.prefill.queue_s, self.lag_s) + all_s - rest_s + slack_s

    def _to_come_s(self) -> float:
        """Return the seconds until the last copy of the fetch has ended, by the present rates."""
        seconds = [0.0]
        for depth, link in enumerate(self.links):
            own = {copy_id for at, copy_id in self._copies if at == depth}
            if own:
                seconds.append(link.copier.seconds_until(Direction.PROMOTE, own))
        return max(seconds)

    @property
    def digests(self) -> Sequence[bytes]:
        """Digests of the blocks that the fetch fills."""
        return self.sequences[0].digests[self.first : self.stop]

    def give_up(self) -> None:
        """Begin no further copy; what has arrived can be used."""
        self.is_given_up = True
        for depth, copy_id in tuple(self._copies):
            self.links[depth].cancel(copy_id)

    def release(self) -> None:
        """Release in each tier what no open copy reads or writes. Call this when nothing more will be copied."""
        caches: list[PrefixCache] = [self.links[0].upper, *[link.lower for link in self.links]]
        busy = {tier for depth, _ in self._copies for tier in (depth, depth + 1)}
        for tier, cache in enumerate(caches):
            if tier not in busy and tier not in self._released:
                self._released.add(tier)
                cache.release(self.sequences[tier])

    def _copy(self, depth: int, start: int, stop: int) -> None:
        link = self.links[depth]
        upper, lower = self.sequences[depth : depth + 2]
        pairs = [BlockPair(lower.blocks[i], upper.blocks[i]) for i in range(start, stop)]
        if depth:
            self.links[depth - 1].describe(upper, start, stop)

        def ended(end: FinishedCopy) -> None:
            del self._copies[depth, copy_id]
            self._land(depth, start, pairs, end)

        copy_id = link.copy(Direction.PROMOTE, pairs, ended)
        self._copies[depth, copy_id] = None

    def _land(self, depth: int, start: int, pairs: Sequence[BlockPair], end: FinishedCopy) -> None:
        """Index a piece that has arrived in the upper tier of link `depth`, perhaps only a part of it."""
        arrived = self._arrived[depth]
        arrived[start] = start + leading(pairs, end)
        if end.error is not None:
            self.has_failed = True
            self.links[depth].spoilt.update(pair.source for pair in end.dropped)
        before = at = self._committed[depth]
        while (stop := arrived.pop(at, at)) > at:
            at = stop
        if at == before:
            return
        self._committed[depth] = at
        self.links[depth].upper.commit(self.sequences[depth], at * self.block_size)
        if depth:  # they were written just now
            self.links[depth - 1].spoilt.difference_update(self.sequences[depth].blocks[before:at])
        if not depth:
            self.landed = at - self.first
        elif not self.is_given_up and at > (start := max(before, self._committed[depth - 1])):
            self._copy(depth - 1, start, at)


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A fetch that was decided but has not begun."""

    sequence: CachedSequence
    first: int
    """The pool holds the blocks before this one."""
    stop: int
    reserve_blocks: int
    """Blocks to leave for running requests."""
    prefill: Prefill
    since_s: float
    """When the request began to wait."""
    held: Sequence[Held]
    """By tier: what it holds of the request."""

    @property
    def digests(self) -> Sequence[bytes]:
        """Digests of the blocks that the fetch will fill."""
        return self.sequence.digests[self.first : self.stop]

    @property
    def blocks_by_link(self) -> list[int]:
        """By link: the number of blocks that the fetch will ask it for when it begins."""
        left, asked = self.stop - self.first, []
        for part in self.held:
            asked.append(min(part.blocks, left))
            left -= asked[-1]
        return asked

    @property
    def is_all(self) -> bool:
        """Whether the fetch covers everything that the tiers hold."""
        return self.stop == self.first + sum(part.blocks for part in self.held)

    def begin(self, pool: PrefixCache, all_links: Sequence[Link], least_piece: int) -> Fetch | None:
        """Take the blocks in each tier and ask for the copies; return None, with nothing changed, if a tier has no room
        or lacks blocks by now. `all_links`: from the pool downwards; `least_piece`: least blocks of a piece."""
        stop = self.stop
        for depth, link in enumerate(all_links):  # noqa: B007
            readable, is_spoilt = link.readable_blocks(self.sequence, stop * pool.block_size)
            if readable >= stop:
                break
            if is_spoilt:
                return None
        else:
            return None
        links = all_links[: depth + 1]
        caches = [pool, *[link.lower for link in links]]
        sequences: list[CachedSequence] = []
        present: list[int] = []
        for cache in caches:
            part = self.sequence.fork()
            # The pool counts the use when the request starts.
            is_pool = cache is pool
            had = cache.hold(part, stop, self.reserve_blocks if is_pool else 0, counts_use=not is_pool)
            if had is None:
                for other, taken in zip(caches, sequences, strict=False):
                    other.release(taken)
                return None
            sequences.append(part)
            present.append(had)
        lag_s = max(part.queue_s for part in self.held[: depth + 1])
        fetch = Fetch(self.prefill, self.since_s, lag_s, links, sequences, present[0], stop, least_piece)
        fetch.begin(present)
        return fetch
