"""The interface between the scheduler and the tiers below the pool."""

from __future__ import annotations

from typing import Protocol

from engine.cache.changes import KeyChanges
from engine.cache.sequence import CachedSequence
from engine.contract.events import Keys
from engine.contract.fetch_costs import FetchCosts
from engine.contract.load import StepCost


class LowerTiers(Protocol):
    """Keeps what requests leave behind and brings it back. No method waits; `engine.tiers` implements it."""

    def begin_step(self, others_s: float) -> None:
        """Note that a step is planned whose requests wait for no tier, and which takes about `others_s` seconds.

        0: there are no such requests, or the time is not known. Until the next step, work for tiers takes at most a
        small share of this time.
        """
        ...

    def poll(self, *, is_idle: bool = False) -> None:
        """Process copies that have ended since the last call. `is_idle`: no request is computed, so none is delayed."""
        ...

    def expect(self, request_id: int, sequence: CachedSequence, known_tokens: int, *, cached_blocks: int) -> None:
        """Begin slow look-ups for a request that has arrived and that the next step may start."""
        ...

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
        """Whether the request should not start now, because blocks that it can reuse are on their way.

        Begins to fetch them if that is sooner than computing them. Returns False once they are there or the fetch is
        given up. `cached_blocks`: its blocks in the pool; `fits`: whether the pool has room for it (otherwise nothing
        is fetched); `reserve_blocks`: blocks to leave for running requests; `queue_s`: seconds until the device could
        begin to compute this prompt. `pace_s`: seconds of the step in which it would begin, and of each later step of
        others, both without this request; 0: there is no such step, so the request can begin at any time.
        """
        ...

    def forget(self, request_id: int) -> None:
        """Forget a request that has started or has left."""
        ...

    def take_over(self, sequence: CachedSequence) -> None:
        """Release the blocks of a request that has ended, once those worth keeping have been copied."""
        ...

    def make_room(self) -> bool:
        """Give up copies that keep blocks from being free, because a request lacks blocks; return whether that made
        any available. Blocks of copies that have begun become available later."""
        ...

    @property
    def holds_blocks(self) -> bool:
        """Whether copies hold blocks of the pool, which become available once the copies have ended."""
        ...

    def learn_cost(self, cost: StepCost, least_s: float = 0.0) -> None:
        """Note what computing costs; all zero: not known yet. No step is shorter than `least_s` seconds."""
        ...

    def fetch_costs(self) -> FetchCosts:
        """Return what fetching takes now, for the load report."""
        ...

    def reset(self) -> None:
        """Forget everything that the tiers keep."""
        ...

    def take_changes(self) -> KeyChanges:
        """Return the net change of the keys held in the pool and below it since the last call."""
        ...

    def held_keys(self) -> tuple[Keys, Keys, Keys]:
        """Return every held key by the fastest tier that holds it, parents first."""
        ...
