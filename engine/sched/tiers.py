"""The seam between the scheduler and the tiers below the pool."""

from __future__ import annotations

from typing import Protocol

from engine.cache.changes import KeyChanges
from engine.cache.sequence import CachedSequence
from engine.contract.events import Keys
from engine.contract.fetch_costs import FetchCosts
from engine.contract.load import StepCost


class LowerTiers(Protocol):
    """Keeps what requests leave behind and brings it back. No method waits; `engine.tiers` implements it."""

    def poll(self) -> None:
        """Take in what has been copied since the last call."""
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
    ) -> bool:
        """Whether the request had better not start now, because blocks that it can reuse are on their way.

        Begins to fetch them where that is sooner than computing them. Once they are there, or the fetch is given up,
        the answer is False. `cached_blocks`: that it finds in the pool; `fits`: whether the pool has room for it, for
        nothing is fetched else; `reserve_blocks`: to be left for running requests; `queue_s`: seconds until the device
        could begin to compute this prompt.
        """
        ...

    def forget(self, request_id: int) -> None:
        """The request has started or has left: it waits no more."""
        ...

    def take_over(self, sequence: CachedSequence) -> None:
        """The request has ended: release its blocks, once what is worth keeping of them has been copied."""
        ...

    def make_room(self) -> None:
        """A request does not start for lack of blocks: give up copies that keep blocks from being free."""
        ...

    def learn_cost(self, cost: StepCost) -> None:
        """What computing costs; all zero: not known yet."""
        ...

    def fetch_costs(self) -> FetchCosts:
        """What fetching takes now, for the load report."""
        ...

    def reset(self) -> None:
        """Forget everything kept."""
        ...

    def take_changes(self) -> KeyChanges:
        """Net change of the keys held in the pool and below it, since the last call."""
        ...

    def held_keys(self) -> tuple[Keys, Keys, Keys]:
        """Every held key by the fastest tier that holds it, parents first."""
        ...
