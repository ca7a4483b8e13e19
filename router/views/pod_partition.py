"""Which pods each of several gateways tries first, because no gateway sees at once what the others send."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

_HALF_LIFE_S = 20.0
_DELAY_FOLLOW = 0.1
_MOST_DELAY_S = 1.0
_SILENT_SHARE = 0.01
"""A gateway with less than this share of the work does not count."""
_COPY_SHARE = 0.5
_FOLLOW = 0.05
"""Weight of a request in the mean prefill of others' requests."""
_LEAST_S = 0.5
"""A rate is taken from at least this many seconds of traffic."""
LEAST_PART = 0.02
"""If a gateway's part of a pod is smaller than this, the pod is not one of its own."""
EQUAL = 0.2
"""If no share differs from an even share by more than this part of it, all count as even: chance moves them so far. If
the borders moved with each such change, two gateways would at times take the same pod for their own."""
_GATEWAYS = 256
"""Gateways that are counted at a time."""


class PodPartition(NamedTuple):
    """The own pods of one gateway: a stretch of all pods in order of pod id."""

    low: float
    high: float
    """The stretch goes from `low` to `high`, as parts of all pods, 0 to 1."""
    unseen_s: float
    """Seconds of prefill that another gateway may have sent to one of its own pods without having told this one yet."""
    borders: tuple[float, ...] = ()
    """Where the stretches of all gateways meet, 0 to 1, ascending; empty: all others count as one gateway."""
    is_synced: bool = False
    """Whether gateways tell each other of each request at once. If not, several may make the same copy."""

    @property
    def share(self) -> float:
        """The share of all gateways' work that this gateway's requests stand for: its own share, but at least an even
        one. With less, a request would stand for dozens of others that may be nothing like it. 1 if gateways do not
        tell each other of requests."""
        return max(1 / (len(self.borders) + 1), self.high - self.low) if self.is_synced else 1.0

    def part(self, row: int, pods: int) -> float:
        """Return how much of the pod in place `row` of `pods` pods is this gateway's own, 0 to 1."""
        return max(0.0, min(self.high * pods, row + 1.0) - max(self.low * pods, float(row)))

    def own_rows(self, pods: int) -> range:
        """Return which places, of `pods` in all, are this gateway's own by `LEAST_PART` or more. They are adjacent."""
        if self.own_pods(pods) < LEAST_PART:
            return range(0)
        first = max(0, math.ceil(self.low * pods + LEAST_PART) - 1)
        return range(first, min(pods, math.floor(self.high * pods - LEAST_PART) + 1))

    def own_pods(self, pods: int) -> float:
        """Return how many of `pods` pods are this gateway's own; parts of pods count as fractions."""
        return (self.high - self.low) * pods

    def guest_ranks(self, rows: Sequence[int], ranks: Sequence[float], pods: int) -> list[float]:
        """Return the order in which this gateway, as a guest, takes others' pods; the lowest rank comes first.

        `rows`: places, among `pods` pods, of equally good pods that all belong to other gateways. `ranks`: the order in
        which their owners take them. Equal ranks of one owner stay equal. The owner's next pod may have an unseen
        request already, so a guest takes the pod that its owner takes last. Each guest begins with the pods of the
        gateway after itself, so that two guests do not choose the same pod either.
        """
        gateways = len(self.borders) + 1
        own = bisect_right(self.borders, (self.low + self.high) / 2)
        by_owner: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            by_owner.setdefault(bisect_right(self.borders, (row + 0.5) / pods), []).append(i)
        found = [0.0] * len(rows)
        for owner, places in by_owner.items():
            order = sorted([ranks[i] for i in places])
            for i in places:
                found[i] = float((owner - own) % gateways - bisect_left(order, ranks[i]) * gateways)
        return found


def partition_of(works_s: Mapping[str, float], own: str, unseen_s: float, *, is_synced: bool) -> PodPartition:
    """Return the pods of the gateway `own`. `works_s`: recent prefill by gateway, in the order of names."""
    gateways = len(works_s)
    *sums_s, total_s = accumulate(works_s.values())
    even_s = total_s / gateways
    if all(abs(work_s - even_s) <= EQUAL * even_s for work_s in works_s.values()):
        borders = tuple([number / gateways for number in range(1, gateways)])
    else:
        borders = tuple([sum_s / total_s for sum_s in sums_s])
    place = list(works_s).index(own)
    return PodPartition((0.0, *borders)[place], (*borders, 1.0)[place], unseen_s, borders, is_synced)


def spared_unseen_s(partition: PodPartition, token_s: float, spared_tokens: float) -> float:
    """Return `unseen_s` for a pod with the longest match, which is `spared_tokens` longer than on some other pod. It is
    at most half of the prefill of these tokens: otherwise unseen requests that may not exist would cause copies."""
    return min(partition.unseen_s, _COPY_SHARE * token_s * spared_tokens) if spared_tokens else partition.unseen_s


class Gateways:
    """Each gateway's recent prefill, this one's included: a gateway's share of it is its share of the pods.

    A gateway hears of the others' requests some milliseconds late, more if it or Redis is busy. Meanwhile a pod that
    was just sent a long prompt looks idle to all other gateways, and equal rules send all their next requests there.
    So each gateway allows for what others send in that time, on every pod except its own:

        unseen_s = min(seconds of prefill that others send per second * seconds until news arrives, their usual prefill)

    In most cases at most one request is unseen. With a larger bound, gateways that hear each other late would keep to
    their own pods and leave the others' pods idle.

    Gateways in the order of their names divide the pods in the order of pod ids, so each pod is some gateway's own.
    Nothing is reserved: another gateway's pod is chosen if it is clearly better.
    """

    def __init__(self, own: str) -> None:
        """`own`: this gateway's name; all gateways sort the names in the same way."""
        self._own = own
        self._work_s: dict[str, float] = {}
        """Seconds of prefill by gateway, in the order of names, in units that grow as the seconds decay."""
        self._origin_s = 0.0
        self._delay_s = 0.0
        self._began_s = math.inf
        """When the first request was counted."""
        self._usual_s: float | None = None
        """Mean prefill of a request of another gateway."""

    def gone(self, gateway: str) -> None:
        """Note that another gateway has stopped: it has no pods of its own any more."""
        self._work_s = {name: work_s for name, work_s in self._work_s.items() if name != gateway}

    def sent(self, work_s: float, now_s: float) -> None:
        """Count prefill that this gateway sends."""
        self._add(self._own, work_s, now_s)

    def heard(self, gateway: str, work_s: float, delay_s: float, now_s: float) -> None:
        """Count prefill that another gateway sent `delay_s` ago."""
        if gateway not in self._work_s and len(self._work_s) >= _GATEWAYS:
            del self._work_s[min(self._work_s, key=self._work_s.__getitem__)]
        usual_s = work_s if self._usual_s is None else self._usual_s
        self._usual_s = usual_s + _FOLLOW * (work_s - usual_s)
        self._delay_s += _DELAY_FOLLOW * (min(max(0.0, delay_s), _MOST_DELAY_S) - self._delay_s)
        self._add(gateway, work_s, now_s)

    def partition(self, now_s: float) -> PodPartition | None:
        """This gateway's own pods; None while it is the only one that sends anything."""
        if len(self._work_s) < 2:
            return None
        total_s = math.fsum(self._work_s.values())
        works_s = {name: work_s for name, work_s in self._work_s.items() if work_s > _SILENT_SHARE * total_s}
        own_s = works_s.get(self._own, 0.0)
        total_s = math.fsum(works_s.values())
        if not own_s or own_s == total_s:
            return None
        # How far the decayed sum has come towards its final value, if traffic began at `_began_s` and keeps its rate.
        counted = 1 - math.exp2(-max(_LEAST_S, now_s - self._began_s) / _HALF_LIFE_S)
        rate = (total_s - own_s) / self._unit(now_s) * math.log(2) / (_HALF_LIFE_S * counted)
        unseen_s = min(rate * self._delay_s, self._usual_s or 0.0)
        return partition_of(works_s, self._own, unseen_s, is_synced=True)

    def _add(self, gateway: str, work_s: float, now_s: float) -> None:
        self._began_s = min(self._began_s, now_s)
        unit = self._unit(now_s)
        if unit > 2.0**30:
            self._work_s = {name: work / unit for name, work in self._work_s.items()}
            self._origin_s, unit = now_s, 1.0
        if gateway in self._work_s:
            self._work_s[gateway] += work_s * unit
        else:
            self._work_s = dict(sorted([*self._work_s.items(), (gateway, work_s * unit)]))

    def _unit(self, now_s: float) -> float:
        return math.exp2(min(max(0.0, now_s - self._origin_s) / _HALF_LIFE_S, 1000.0))
