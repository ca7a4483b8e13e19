"""Each gateway's recent prefill, as gateways tell each other every second. It decides which pods a gateway tries
first."""

from __future__ import annotations

import math
from dataclasses import replace

from router.routing.shares import ShareReport, TrafficShares
from router.views.pod_partition import PodPartition, partition_of

_HALF_LIFE_S = 20.0
_FRESH_S = 5.0
"""How long a gateway's message counts. A gateway that is gone, or cut off from Redis, has no pods of its own."""
_SILENT_SHARE = 0.01
"""A gateway with less than this share of the work does not count."""
_GATEWAYS = 256
"""Gateways that are counted at a time."""
UNSEEN_S = 0.08
"""Mean time from another gateway's request to the arrival of a load report that counts it: three quarters of the 0.1 s
between a busy pod's reports, plus transport."""


class PrefillShares:
    """Seconds of prefill that each gateway sent to pods that report their load. Times are of one monotonic clock.

    A report shows what other gateways sent, but it comes late. Until then a pod that was just sent a long prompt looks
    idle to all other gateways. So each gateway first tries a stretch of the pods that is as long as its share of the
    work, and knows nearly all requests on these pods at once. On other pods it allows for unseen requests; see
    `PodPartition`.
    """

    def __init__(self, own: str) -> None:
        """`own`: this gateway's name; all gateways sort the names in the same way."""
        self._own = own
        self._own_s = 0.0
        """Work as of `_as_of_s`; `_since_s` is the work sent since."""
        self._as_of_s = 0.0
        self._since_s = 0.0
        self._others: dict[str, tuple[float, float]] = {}
        """Name -> (seconds of prefill, time of the message), longest silent first."""
        self._partition: PodPartition | None = None
        self._valid_until_s = -math.inf

    def sent(self, work_s: float) -> None:
        """Count prefill that this gateway sends."""
        self._since_s += work_s

    def export_s(self, now_s: float) -> float:
        """Return this gateway's recent prefill in seconds, for the others' `merge`."""
        self._own_s = _decayed(self._own_s, now_s - self._as_of_s) + self._since_s
        self._as_of_s, self._since_s = now_s, 0.0
        self._valid_until_s = -math.inf
        return self._own_s

    def merge(self, gateway: str, work_s: float, as_of_s: float) -> None:
        """Take another gateway's recent prefill, as of `as_of_s`."""
        self._others.pop(gateway, None)
        if len(self._others) >= _GATEWAYS:
            del self._others[next(iter(self._others))]
        self._others[gateway] = work_s, as_of_s
        self._valid_until_s = -math.inf

    def partition(self, now_s: float) -> PodPartition | None:
        """Return this gateway's own pods; None while no other gateway sends anything."""
        if now_s >= self._valid_until_s:
            self._partition = self._computed(now_s)
        return self._partition

    def _computed(self, now_s: float) -> PodPartition | None:
        self._others = {name: told for name, told in self._others.items() if now_s - told[1] < _FRESH_S}
        self._valid_until_s = min([at_s for _, at_s in self._others.values()], default=math.inf) + _FRESH_S
        if not self._others:
            return None
        works_s = {name: _decayed(work_s, now_s - at_s) for name, (work_s, at_s) in self._others.items()}
        works_s[self._own] = own_s = _decayed(self._own_s, now_s - self._as_of_s) + self._since_s
        least_s = _SILENT_SHARE * math.fsum(works_s.values())
        works_s = {name: work_s for name, work_s in works_s.items() if work_s > least_s}
        if self._own not in works_s or len(works_s) == 1:
            return None
        total_s = math.fsum(works_s.values())
        rate = (total_s - own_s) * math.log(2) / _HALF_LIFE_S
        return partition_of(dict(sorted(works_s.items())), self._own, rate * UNSEEN_S, is_synced=False)


class ModelShares:
    """What gateways exchange about one model."""

    def __init__(self, own: str, traffic: TrafficShares | None) -> None:
        """`own`: see `PrefillShares`. `traffic`: the counters of `affinity_groups`."""
        self.prefill = PrefillShares(own)
        self.traffic = traffic

    def export(self, now_s: float) -> ShareReport:
        """Return this gateway's counters."""
        report = ShareReport((), 0.0) if self.traffic is None else self.traffic.export(now_s)
        return replace(report, prefill_s=self.prefill.export_s(now_s))

    def merge(self, gateway_id: str, report: ShareReport, now_s: float) -> None:
        """Take another gateway's counters, as of `now_s`, in place of its previous ones."""
        self.prefill.merge(gateway_id, report.prefill_s, now_s)
        if self.traffic is not None:
            self.traffic.merge(gateway_id, report, now_s)


def _decayed(work_s: float, age_s: float) -> float:
    return work_s * math.exp2(-max(0.0, age_s) / _HALF_LIFE_S)
