"""Which pods each of several gateways tries first, as none sees at once what the others send."""

from __future__ import annotations

import math
from typing import NamedTuple

_HALF_LIFE_S = 20.0
_DELAY_FOLLOW = 0.1
_MOST_DELAY_S = 1.0
_SILENT_SHARE = 0.01
"""A gateway that does less than this share of the work counts as none."""
_COPY_SHARE = 0.5
_FOLLOW = 0.05
"""Weight of a request in the mean prefill of those of others."""
_LEAST_S = 0.5
"""Seconds of traffic that a rate is taken from at least."""
LEAST_PART = 0.02
"""Of a pod: it is nobody's own by less."""
_GATEWAYS = 256
"""Gateways that are counted at a time."""


class Parting(NamedTuple):
    """The own pods of one gateway: a stretch of all of them, in order of pod id."""

    low: float
    high: float
    """From `low` to `high` of all pods, 0 to 1."""
    unseen_s: float
    """Seconds of prefill that another gateway may have sent to a pod of its own and not told yet."""

    def part(self, row: int, pods: int) -> float:
        """How much of the pod in this place of so many is its own, 0 to 1."""
        return max(0.0, min(self.high * pods, row + 1.0) - max(self.low * pods, float(row)))

    def own_rows(self, pods: int) -> range:
        """The places, of so many, of the pods that are its own by `LEAST_PART` or more: they lie side by side."""
        if self.own_pods(pods) < LEAST_PART:
            return range(0)
        first = max(0, math.ceil(self.low * pods + LEAST_PART) - 1)
        return range(first, min(pods, math.floor(self.high * pods - LEAST_PART) + 1))

    def own_pods(self, pods: int) -> float:
        """How many of so many pods are its own, parts counted as such."""
        return (self.high - self.low) * pods


def spared_unseen_s(parting: Parting, token_s: float, spared_tokens: float) -> float:
    """`unseen_s` on a pod with the longest match, of which it has so many tokens more than some other pod: at most
    half of their prefill, else requests would make copies out of fear."""
    return min(parting.unseen_s, _COPY_SHARE * token_s * spared_tokens) if spared_tokens else parting.unseen_s


class Gateways:
    """What each gateway sends of late, this one included: each counts the pods as its own by its share of that.

    A gateway hears of the others' requests some milliseconds late, more where it or Redis is busy. Meanwhile a pod
    looks idle that was just sent a long prompt, and it looks so to all alike: equal rules send all their next requests
    there. So what others send in that time is reckoned on any pod but a gateway's own:

        unseen = min(others' prefill, s per s * seconds until it is told, a usual prefill of theirs)

    One unseen request is what mostly lies there: with more in the sum, gateways far apart would each keep to its own
    pods and let the others' stand idle.

    All gateways line up in the order of their names and the pods in the order of theirs, so that each pod is some
    gateway's own. Nothing is reserved: a pod of others that is better by more is chosen.
    """

    def __init__(self, own: str) -> None:
        """`own`: this gateway's name, among names that are sorted alike everywhere."""
        self._own = own
        self._work_s: dict[str, float] = {}
        """Seconds of prefill by gateway, in units that grow as they decay."""
        self._origin_s = 0.0
        self._delay_s = 0.0
        self._began_s = math.inf
        """When the first request was counted."""
        self._usual_s: float | None = None
        """Mean prefill of a request of another gateway."""

    def sent(self, work_s: float, now_s: float) -> None:
        """This gateway sends so much prefill."""
        self._add(self._own, work_s, now_s)

    def heard(self, gateway: str, work_s: float, delay_s: float, now_s: float) -> None:
        """Another gateway sent so much prefill, `delay_s` ago."""
        if gateway not in self._work_s and len(self._work_s) >= _GATEWAYS:
            del self._work_s[min(self._work_s, key=self._work_s.__getitem__)]
        usual_s = work_s if self._usual_s is None else self._usual_s
        self._usual_s = usual_s + _FOLLOW * (work_s - usual_s)
        self._delay_s += _DELAY_FOLLOW * (min(max(0.0, delay_s), _MOST_DELAY_S) - self._delay_s)
        self._add(gateway, work_s, now_s)

    def parting(self, now_s: float) -> Parting | None:
        """This gateway's own pods; None while it is the only one that sends anything."""
        if len(self._work_s) < 2:
            return None
        total_s = math.fsum(self._work_s.values())
        works_s = {name: work_s for name, work_s in self._work_s.items() if work_s > _SILENT_SHARE * total_s}
        own_s = works_s.get(self._own, 0.0)
        total_s = math.fsum(works_s.values())
        if not own_s or own_s == total_s:
            return None
        before_s = math.fsum(work_s for name, work_s in works_s.items() if name < self._own)
        # Part of the decayed sum that there would be if it had always come at this rate.
        counted = 1 - math.exp2(-max(_LEAST_S, now_s - self._began_s) / _HALF_LIFE_S)
        rate = (total_s - own_s) / self._unit(now_s) * math.log(2) / (_HALF_LIFE_S * counted)
        unseen_s = min(rate * self._delay_s, self._usual_s or 0.0)
        return Parting(before_s / total_s, (before_s + own_s) / total_s, unseen_s)

    def _add(self, gateway: str, work_s: float, now_s: float) -> None:
        self._began_s = min(self._began_s, now_s)
        unit = self._unit(now_s)
        if unit > 2.0**30:
            self._work_s = {name: work / unit for name, work in self._work_s.items()}
            self._origin_s, unit = now_s, 1.0
        self._work_s[gateway] = self._work_s.get(gateway, 0.0) + work_s * unit

    def _unit(self, now_s: float) -> float:
        return math.exp2(min(max(0.0, now_s - self._origin_s) / _HALF_LIFE_S, 1000.0))
