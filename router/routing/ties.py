"""Which of several pods with about the same score takes a request: rules that each leave out some pods.

Predictions err, so small differences between scores mean nothing. ABLATION.md says what each rule gains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from router.routing.recent import RecentWork
from router.routing.terms import Estimate
from router.views.pick import by_hash
from router.views.pod_partition import PodPartition
from router.views.table import Floats, Ints, number_at, smallest

TIE_SHARE = 0.6
"""Scores that differ by less than this share of a prefill count as equal: predictions of queues err by as much. The
prefill is the request's own, or a usual prompt's if that is less: for a prompt fifty times as long, a share of its own
prefill would be seconds, far more than a prediction errs."""
UNSHARED_TIE_SHARE = 1.2
"""The same share for traffic that shares nothing: steady arrivals at each pod are then worth more than short queues."""


@dataclass(slots=True)
class Tie:
    """What the rules need to know."""

    at: Estimate
    scores: Floats
    best: int
    """The row of the lowest score."""
    shares: bool
    """Whether recent requests had prefixes in common."""
    recent: RecentWork

    @property
    def prefill_s(self) -> float:
        """The request's prefill on the best pod."""
        return number_at(self.at.prefill_s, self.best)

    @property
    def slack_s(self) -> float:
        """Scores that differ by this much count as equal."""
        share = TIE_SHARE if self.shares else UNSHARED_TIE_SHARE
        return share * min(self.prefill_s, self.at.usual.prefill_s)


def close_score(tie: Tie, rows: Ints) -> Ints:
    """Leave the pods whose score is hardly above the best."""
    return (tie.scores <= float(tie.scores[tie.best]) + tie.slack_s).nonzero()[0]


def same_match(tie: Tie, rows: Ints) -> Ints:
    """Leave the pods that hold as much of the prompt as the best, and the request's adapter if the best does."""
    matched, adapter_s = tie.at.pods.matched, tie.at.pods.adapter_s
    if matched is not None:
        rows = rows[matched[rows] >= matched[tie.best]]
    return rows if adapter_s is None else rows[adapter_s[rows] <= adapter_s[tie.best]]


def same_speed(tie: Tie, rows: Ints) -> Ints:
    """Leave the pods on which the prefill takes about as long. This leaves out a pod of half the speed."""
    prefill_s = tie.at.prefill_s
    return rows if isinstance(prefill_s, float) else rows[prefill_s[rows] <= (1 + TIE_SHARE) * tie.prefill_s]


def fewest_waiting(tie: Tie, rows: Ints) -> Ints:
    """Leave the pods with the fewest requests that wait for a first token."""
    columns = tie.at.pods.columns
    return _least(rows, np.maximum(columns.in_flight[rows] - columns.decoding[rows], 0.0))


def idle_first(tie: Tie, rows: Ints) -> Ints:
    """Leave the pods without any request, if there are such and this is the only gateway."""
    if tie.at.request.partition is not None:
        return rows
    is_idle = tie.at.pods.columns.in_flight[rows] == 0
    return _if_any(rows[is_idle], rows)


def own_pods_first(tie: Tie, rows: Ints) -> Ints:
    """Leave this gateway's own pods, if there are any, because other gateways avoid these."""
    partition = tie.at.request.partition
    if partition is None:
        return rows
    return _if_any(rows[_is_own(partition, rows, len(tie.scores))], rows)


def least_recent_work(tie: Tie, rows: Ints) -> Ints:
    """Leave the pod that was sent the least work lately. Equal requests then come evenly to each pod, and a pod that
    was sent a long prompt is left alone for a while."""
    ids, partition = tie.at.pods.table.ids, tie.at.request.partition
    ranks = tie.recent.ranks(ids)[rows]
    if partition is not None:
        ranks = gateway_ranks(partition, rows, ranks, len(ids))
    return _least(rows, ranks)


def gateway_ranks(partition: PodPartition, rows: Ints, ranks: Floats, pods: int) -> Floats:
    """Return the ranks for one of several gateways. If a pod belongs to this gateway only in part, its recent work
    counts for more. If all pods belong to others, the order is that of `guest_ranks`."""
    if not _is_own(partition, rows, pods).all():
        return np.array(partition.guest_ranks(rows.tolist(), ranks.tolist(), pods))
    weighted: Floats = ranks / np.array([partition.part(row, pods) for row in rows.tolist()])
    return weighted


Rule = Callable[[Tie, Ints], Ints]
RULES: tuple[Rule, ...] = (
    close_score,
    same_match,
    same_speed,
    fewest_waiting,
    idle_first,
    own_pods_first,
    least_recent_work,
)
"""The rules, in order."""


def settle(tie: Tie) -> int:
    """Return the row of the pod that takes the request."""
    rows = _all_rows(tie)
    for rule in RULES:
        rows = rule(tie, rows)
        if len(rows) == 1:
            return int(rows[0])
    return by_hash(tie.at.request, tie.at.pods, rows)


def left_out_by(tie: Tie) -> list[str]:
    """Return for each pod the name of the rule that leaves it out; empty for the pods that no rule leaves out."""
    found, rows = [""] * len(tie.scores), _all_rows(tie)
    for rule in RULES:
        left = rule(tie, rows)
        for row in np.setdiff1d(rows, left).tolist():
            found[row] = rule.__name__
        rows = left
    return found


def _all_rows(tie: Tie) -> Ints:
    return np.arange(len(tie.scores))


def _least(rows: Ints, numbers: Floats) -> Ints:
    least: Ints = rows[numbers == smallest(numbers)]
    return least


def _if_any(some: Ints, rows: Ints) -> Ints:
    return some if len(some) else rows


def _is_own(partition: PodPartition, rows: Ints, pods: int) -> NDArray[np.bool_]:
    own = partition.own_rows(pods)
    return (rows >= own.start) & (rows < own.stop)
