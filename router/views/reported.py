"""A pod's last load report, and the part of that load that this gateway did not send. It counts less with age."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from engine.contract.fetch_costs import NO_FETCH_COSTS, FetchCosts
from engine.contract.load import LoadReport

FRESH_S = 3.0
"""A report counts fully up to this age ..."""
STALE_S = 10.0
"""... and not at all from this one."""
PARTS = 1_000_000
"""Blocks that stand for a KV cache if only its used share is known."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What an engine's metrics say of its load at one moment."""

    running: int
    waiting: int
    kv_used: float | None = None
    """Share of the KV cache that running requests hold, 0 to 1; None: unknown."""

    def as_load(self) -> LoadReport:
        """Return the counts as a load report, without what metrics do not show."""
        total = 0 if self.kv_used is None else PARTS
        free = round((1 - (self.kv_used or 0.0)) * total)
        return LoadReport(self.running, self.waiting, blocks_free=free, blocks_total=total)


class Reported:
    """The last report of a pod. Every time is seconds of the clock of its `PodState`."""

    __slots__ = ("_waiting_since_s", "at_s", "fetch", "is_count", "kv_used", "load", "others", "others_until_s")

    def __init__(self) -> None:
        self.load: LoadReport | None = None
        self.at_s = 0.0
        self.fetch: FetchCosts = NO_FETCH_COSTS
        """What fetching from the pod's tiers costs, by the last report that said so."""
        self.is_count = False
        """Whether the last report was the engine's count of its requests. This gateway may still hear of requests that
        others sent before that report."""
        self.kv_used = 0.0
        """Share of KV blocks that running requests hold."""
        self.others = LoadReport()
        """The part of the last report's load that this gateway did not send."""
        self.others_until_s = 0.0
        """When the others' prefill should end."""
        self._waiting_since_s = math.inf
        """When the unbroken run of reports with waiting requests began; infinite if the last report has none."""

    def note(self, load: LoadReport, now_s: float) -> None:
        """Take a report. The caller sets which part of it other gateways sent."""
        self.load, self.at_s = load, now_s
        if load.fetch is not NO_FETCH_COSTS and load.fetch != NO_FETCH_COSTS:  # snapshots lack these costs
            self.fetch = load.fetch
        self.is_count = False
        is_used = load.blocks_free < load.blocks_total
        self.kv_used = min(1.0, 1 - load.blocks_free / load.blocks_total) if is_used else 0.0
        self._waiting_since_s = min(self._waiting_since_s, now_s) if load.waiting else math.inf

    def known_since(self, sent_s: float) -> None:
        """Note a request that another gateway sent at `sent_s` and that is known from now on. If the last report is a
        count that includes it, remove it from the others' share: it would count twice until the next count."""
        others = self.others
        if not self.is_count or sent_s > self.at_s or not others.running:
            return
        waiting = others.running - others.decoding
        if waiting:
            left = (waiting - 1) / waiting
            self.others_until_s = self.at_s + left * (self.others_until_s - self.at_s)
            self.others = replace(
                others, running=others.running - 1, uncached_tokens=round(left * others.uncached_tokens)
            )
        else:
            context = others.context_tokens * (others.decoding - 1) // others.decoding
            self.others = replace(
                others, running=others.running - 1, decoding=others.decoding - 1, context_tokens=context
            )

    def trust(self, now_s: float) -> float:
        """Return how much the last report counts: 1 while it is fresh, 0 once it is stale or if there is none."""
        age_s = now_s - self.at_s
        if self.load is None or age_s >= STALE_S:
            return 0.0
        return 1.0 if age_s <= FRESH_S else (STALE_S - age_s) / (STALE_S - FRESH_S)

    def unsure_s(self, step_s: float) -> float:
        """Return by how much a running step of `step_s` may end later than `step_left_s` predicts: by half of the step.
        It is 0 if other gateways send here, too: a late first token is then a sign of their prefill."""
        return 0.0 if self.others.running else step_s / 2

    def backed_up_s(self, now_s: float) -> float:
        """Return the seconds for which every report has had waiting requests; 0 if the last has none, or is old."""
        if now_s - self.at_s >= FRESH_S:
            return 0.0
        return max(0.0, now_s - self._waiting_since_s)
