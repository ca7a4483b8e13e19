"""Which of several pods with about the same score takes a request: rules that each leave out some pods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from router.routing.recent import RecentWork, Turns
from router.routing.terms import Costing
from router.views.latency import EVENNESS
from router.views.table import Floats, Ints

TIE_SHARE = 0.6
"""Scores that differ by less than this share of a prefill count as equal: predictions of queues err by as much. The
prefill is the request's own, or a usual prompt's if that is less: for a prompt fifty times as long, a share of its own
prefill would be seconds, far more than a prediction errs."""
UNSHARED_TIE_SHARE = 1.2
"""The same share for traffic that shares nothing: steady arrivals at each pod are then worth more than short queues."""
WARM = 0.5
"""A pod that holds at least this part of a prompt counts as warm."""


@dataclass(slots=True)
class Tie:
    """The pods about as good as the best one, and what the rules need."""

    at: Costing
    best: int
    tied_s: float
    """Scores that differ by this much count as equal."""
    turns: Turns
    recent: RecentWork

    @property
    def is_warm(self) -> bool:
        """Whether the best pod is warm."""
        return self.at.pods.matched_by(self.best) >= WARM * self.at.request.prompt_tokens

    @property
    def is_evened(self) -> bool:
        """Whether `even_arrivals` counts."""
        return self.is_warm and self.at.request.parting is None and even_arrivals in RULES

    @property
    def prefill_s(self) -> float:
        """The request's prefill on the best pod."""
        return _at(self.at.prefill_s, self.best)

    def rows(self) -> Ints:
        """Return the pods whose score is hardly above the best."""
        scores = self.at.scores
        limit = float(scores[self.best]) + self.tied_s
        if self.is_evened:
            limit += running_step_s(self)
        return (scores <= limit).nonzero()[0]


def running_step_s(tie: Tie) -> float:
    """Return the seconds by which the running step may end sooner or later than predicted: half of the step."""
    return float(tie.at.step_s[tie.best]) / 2


def no_shorter_match(tie: Tie, rows: Ints) -> Ints:
    """Leave the pods that hold as much as the best."""
    matched = tie.at.pods.matched
    return rows if matched is None else rows[matched[rows] >= matched[tie.best]]


def no_longer_prefill(tie: Tie, rows: Ints) -> Ints:
    """Leave the pods on which the prefill takes about as long: this leaves out a pod of half the speed."""
    prefill_s = tie.at.prefill_s
    if isinstance(prefill_s, float):
        return rows
    own_s = tie.prefill_s
    return rows[prefill_s[rows] <= own_s + TIE_SHARE * own_s]


def even_arrivals(tie: Tie, rows: Ints) -> Ints:
    """Among warm pods, leave those to which no request was sent a moment ago: `uneven_s` is added to the scores."""
    if not tie.is_evened:
        return rows
    evened = tie.at.scores[rows] + uneven_s(tie)[rows]
    return rows[evened <= evened.min() + tie.tied_s]


def fewest_waiting(tie: Tie, rows: Ints) -> Ints:
    """Leave the pods with the fewest requests that wait for a first token."""
    columns = tie.at.pods.columns
    waiting = np.maximum(columns.in_flight[rows] - columns.decoding[rows], 0.0)
    return rows[waiting == waiting.min()]


def idle_first(tie: Tie, rows: Ints) -> Ints:
    """Leave the pods without any request, if there are such and this is the only gateway."""
    if tie.at.request.parting is not None:
        return rows
    is_idle = tie.at.pods.columns.in_flight[rows] == 0
    return rows[is_idle] if is_idle.any() else rows


def own_pods_first(tie: Tie, rows: Ints) -> Ints:
    """Leave this gateway's own pods, if there are any, because other gateways avoid these."""
    partition = tie.at.request.parting
    if partition is None:
        return rows
    own = partition.own_rows(len(tie.at.pods.table))
    is_own = (rows >= own.start) & (rows < own.stop)
    return rows[is_own] if is_own.any() else rows


def by_turn(tie: Tie, rows: Ints) -> Ints:
    """Leave the pod whose last turn is longest ago, or on cold pods the one with the least recent work.

    Turns make the arrivals at each pod even. A prompt computed on a pod attracts similar ones."""
    return rows if len(rows) == 1 else _first(tie, rows, is_warm=tie.is_warm)


def _first(tie: Tie, rows: Ints, *, is_warm: bool) -> Ints:
    ids, partition = tie.at.pods.table.ids, tie.at.request.parting
    ranks = (tie.turns.lasts(ids) if is_warm else tie.recent.ranks(ids))[rows]
    if partition is not None:
        ranks = ranks_of(tie, rows, ranks, is_warm=is_warm)
    return rows[ranks == ranks.min()]


def ranks_of(tie: Tie, rows: Ints, ranks: Floats, *, is_warm: bool) -> Floats:
    """Return the ranks for one of several gateways. If a pod belongs to this gateway only in part, it has its turn less
    often, or its recent work counts for more. If all pods belong to others, the order is that of `guest_ranks`."""
    partition, count = tie.at.request.parting, len(tie.at.pods.table)
    assert partition is not None
    own = partition.own_rows(count)
    if not ((rows >= own.start) & (rows < own.stop)).all():
        return np.array(partition.guest_ranks(rows.tolist(), ranks.tolist(), count))
    parts = np.array([partition.part(row, count) for row in rows.tolist()])
    weighted: Floats = ranks + partition.own_pods(count) / parts if is_warm else ranks / parts
    return weighted


def uneven_s(tie: Tie) -> Floats:
    """Return a surcharge on pods that were sent a request less than a step ago: see `EVENNESS`."""
    columns = tie.at.pods.columns
    unbegun_s: Floats = np.maximum(tie.at.step_s - (tie.at.request.now_s - columns.sent_s), 0.0)
    unbegun_s *= EVENNESS * (columns.in_flight > columns.decoding)
    return unbegun_s


Rule = Callable[[Tie, Ints], Ints]
RULES: tuple[Rule, ...] = (
    no_shorter_match,
    no_longer_prefill,
    even_arrivals,
    fewest_waiting,
    idle_first,
    own_pods_first,
    by_turn,
)
"""The rules, in order."""


def choose(tie: Tie) -> int:
    """Return the row of the pod that takes the request."""
    rows = tie.rows()
    for rule in RULES:
        if len(rows) == 1:
            break
        rows = rule(tie, rows)
    return int(rows[0]) if len(rows) == 1 else tie.at.pods.spread(tie.at.request, rows)


def _at(numbers: float | Floats, row: int) -> float:
    return numbers if isinstance(numbers, float) else float(numbers[row])
