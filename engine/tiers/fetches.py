"""One request's blocks on their way up, and whether waiting for them is still the sooner way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.backend.tiers.base import BlockPair, Direction, FinishedCopy
from engine.backend.tiers.fetch import Choice, Held, Prefill, choose, compute_s
from engine.cache.prefix_cache import PrefixCache
from engine.cache.sequence import CachedSequence
from engine.tiers.link import Link, leading

PIECES = 32
"""A fetch arrives in about as many pieces. Nothing is gained before the first one is there, so it is small."""
LEAST_GAIN, LEAST_GAIN_S = 0.07, 0.002
"""A fetch is to gain so much of what computing everything takes, and so many seconds: what a step costs is learnt, and
not exact, least of all that of a short one."""
LATE_SHARE, LATE_S = 0.04, 0.0002
"""A fetch is given up once its request has lost so much: a share of what computing everything takes, and seconds."""


def plan(prefill: Prefill, held: Sequence[Held]) -> Choice:
    """How many of the blocks of all tiers to fetch; `held`: by tier, each behind the blocks of the one before.

    The tiers are read at the same time, so a block of a slower tier is there when its own queue has come to it and the
    faster tiers' blocks have come.
    """
    best: Choice | None = None
    taken, ready_s, cached = 0, 0.0, prefill.cached_tokens
    recompute_s = prefill.queue_s + compute_s(prefill, 0)
    for part in held:
        behind = Prefill(
            prefill.prompt_tokens, cached, prefill.step_tokens, prefill.cost, max(prefill.queue_s, ready_s)
        )
        choice = choose(behind, part)
        if choice.fetched_blocks and (best is None or choice.first_token_s < best.first_token_s):
            best = Choice(taken + choice.fetched_blocks, choice.first_token_s, recompute_s)
        ready_s = max(ready_s, part.queue_s + part.blocks * part.block_s)
        taken += part.blocks
        cached += part.blocks * part.block_tokens
    if best is None or best.first_token_s > recompute_s - max(LEAST_GAIN_S, LEAST_GAIN * recompute_s):
        return Choice(0, recompute_s, recompute_s)
    return best


@dataclass(slots=True, eq=False)
class Fetch:
    """Fills the pool's blocks `first` .. `stop - 1` of a sequence from the tiers below.

    It holds the sequence's blocks in every tier that takes part, as requests hold theirs in the pool: none is evicted
    while a copy reads or writes it.
    """

    prefill: Prefill
    """`cached_tokens`: as it begins."""
    started_s: float
    links: Sequence[Link]
    """From the pool downwards, as many as take part."""
    sequences: list[CachedSequence]
    """The holding sequence in the pool, and one for the lower tier of each link."""
    first: int
    stop: int
    landed: int = 0
    """Blocks that are indexed in the pool, from `first` on."""
    is_given_up: bool = False
    has_failed: bool = False
    _arrived: list[dict[int, int]] = field(default_factory=list)
    """By link: first block -> stop of pieces in the upper tier that wait for those before them."""
    _present: Sequence[int] = ()
    """By tier, the pool first: the blocks that it held before."""
    _committed: list[int] = field(default_factory=list)
    """By link: the upper tier holds the blocks before this one."""
    _released: set[int] = field(default_factory=set)
    """Tiers in which nothing is held any more."""
    _copies: dict[tuple[int, int], None] = field(default_factory=dict)
    """Link and id of open copies."""

    def begin(self, present: Sequence[int]) -> None:
        """Ask for all pieces; `present`: by tier, the pool first, the blocks that it held before."""
        self._present = present
        self._arrived = [{} for _ in self.links]
        self._committed = list(present[: len(self.links)])
        length = max(1, -(-(self.stop - self.first) // PIECES))
        for depth in range(len(self.links)):
            # Also what the pool has and the tier between lacks: every tier holds the parents of what it holds.
            start, end = present[depth], min(present[depth + 1], self.stop)
            while start < end:
                self._copy(depth, start, stop := min(start + length, end))
                start = stop

    @property
    def is_over(self) -> bool:
        """Whether no copy is open."""
        return not self._copies

    @property
    def landed_tokens(self) -> int:
        """Leading tokens of the prompt whose KV is in the pool."""
        return (self.first + self.landed) * self.block_size

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.links[0].upper.block_size

    def landed_from(self) -> list[int]:
        """By link, the blocks that have landed in the pool and came from its lower tier."""
        here, bounds = self.first + self.landed, self._present
        reached = [min(max(blocks, self.first), here) for blocks in bounds]
        for i in range(1, len(reached)):
            reached[i] = max(reached[i], reached[i - 1])
        return [reached[i + 1] - reached[i] for i in range(len(self.links))]

    def is_late(self, now_s: float) -> bool:
        """Whether it had better be given up: the request has lost by waiting, or will lose by waiting longer."""
        if now_s >= self.late_at_s():
            return True
        rest_s = compute_s(self.prefill, self.landed_tokens)
        to_come = [s for link in self.links if (s := link.copier.seconds_for(Direction.PROMOTE, 0)) is not None]
        device_s = max(0.0, self.started_s + self.prefill.queue_s - now_s)
        continued_s = max([device_s, *to_come]) + compute_s(self.prefill, self.stop * self.block_size)
        return continued_s > device_s + rest_s + LATE_S

    def late_at_s(self) -> float:
        """When the time waited and what is left to compute exceed computing everything, on the clock of `started_s`."""
        all_s, rest_s = compute_s(self.prefill, self.prefill.cached_tokens), compute_s(self.prefill, self.landed_tokens)
        slack_s = max(LATE_S, LATE_SHARE * all_s)
        return self.started_s + self.prefill.queue_s + all_s - rest_s + slack_s

    def give_up(self) -> None:
        """Start nothing more of it; what has arrived is used."""
        self.is_given_up = True
        for depth, copy_id in tuple(self._copies):
            self.links[depth].cancel(copy_id)

    def release(self) -> None:
        """Let go of what no open copy reads or writes, in each tier; nothing more will be copied."""
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
        """The piece has arrived in the upper tier of link `depth`, perhaps not all of it."""
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
        if not depth:
            self.landed = at - self.first
        elif not self.is_given_up and at > (start := max(before, self._committed[depth - 1])):
            self._copy(depth - 1, start, at)
