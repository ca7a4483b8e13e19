"""What other gateways have just sent and this one has not heard of yet: whom it would collide with, and at what cost."""

from __future__ import annotations

import math

_HALF_LIFE_S = 5.0
_NEGLIGIBLE_S = 1e-5


class Unseen:
    """The work of other gateways that is on its way to be told.

    A gateway hears of the others' requests some 0.05 to 0.1 s late. Meanwhile a pod looks idle that has just been sent
    a long prompt, and it looks so to all gateways alike: equal rules send their next requests to the same pod. So
    each gateway counts a part of the pods as its own, all in the same order of pods, and reckons on every other pod with
    the mean work that it cannot have heard of:

        unseen = others' prefill, s per s * seconds until it is told / pods * (1 - own part of the pod)

    Nothing is reserved: a pod of others that is better by more than that is chosen.
    """

    def __init__(self) -> None:
        self._place, self._gateways = 0, 1
        self._work_s = 0.0
        """Others' seconds of prefill, halved every `_HALF_LIFE_S`."""
        self._delay_s = 0.0
        self._at_s = -math.inf

    def share(self, place: int, gateways: int) -> None:
        """This gateway is number `place`, from 0, of so many that serve the pods."""
        self._place, self._gateways = place, gateways

    def heard(self, work_s: float, delay_s: float, now_s: float) -> None:
        """Another gateway sent a request of so much prefill, `delay_s` ago."""
        self._work_s = self._decayed_s(now_s) + work_s
        self._delay_s += 0.1 * (max(0.0, delay_s) - self._delay_s)
        self._at_s = now_s

    def per_pod_s(self, pods: int, now_s: float) -> float:
        """Unseen seconds of prefill on a pod of others; 0 where that is nothing to speak of."""
        if self._gateways < 2 or not self._work_s:
            return 0.0
        rate = self._decayed_s(now_s) * math.log(2) / _HALF_LIFE_S
        unseen_s = rate * self._delay_s / pods * self._gateways / (self._gateways - 1)
        return unseen_s if unseen_s > _NEGLIGIBLE_S else 0.0

    def own_part(self, row: int, pods: int) -> float:
        """The part of a pod, by its place among all, that this gateway counts as its own, 0 to 1."""
        if self._gateways > pods:
            return float(self._place % pods == row)
        low, high = self._place * pods / self._gateways, (self._place + 1) * pods / self._gateways
        return max(0.0, min(high, row + 1.0) - max(low, float(row)))

    def _decayed_s(self, now_s: float) -> float:
        return self._work_s * math.exp2((self._at_s - now_s) / _HALF_LIFE_S) if self._work_s else 0.0
