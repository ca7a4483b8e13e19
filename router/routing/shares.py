"""Shares of prefixes in recent traffic: decayed counters, summed over gateways."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest

from engine.contract.keys import PrefixKey

_RESCALE_AT = 2.0**40
_GATEWAYS_KEPT = 64
_FORGOTTEN_AFTER = 10
"""Half-lives after which a silent gateway's counters are dropped: a thousandth of them is left."""


@dataclass(frozen=True, slots=True)
class KeyWeight:
    """A key, the key one stride shorter (None at the first stride), and its decayed weight."""

    key: PrefixKey
    parent: PrefixKey | None
    weight: float


@dataclass(frozen=True, slots=True)
class ShareReport:
    """One gateway's counters at the moment of its `export`, heaviest keys first."""

    keys: tuple[KeyWeight, ...]
    total: float
    prefill_s: float = 0.0
    """Decayed seconds of prefill that the gateway sent; see `PrefillShares`."""


@dataclass(frozen=True, slots=True)
class Popularity:
    """Shares of the traffic of all gateways, 0 to 1."""

    share: float
    """Share of requests that begin with the key."""
    own: float
    """Share of requests whose longest popular key is this one."""


class TrafficShares:
    """Weight of recent requests by prefix key; a weight halves every `half_life_s`.

    Only the first `depth_strides` keys of a request count. Beyond twice `limit` keys, only the `limit` heaviest stay.
    """

    def __init__(self, *, half_life_s: float, limit: int, depth_strides: int) -> None:
        self._half_life_s = half_life_s
        self._limit = limit
        self._depth_strides = depth_strides
        self._weights: dict[PrefixKey, float] = {}
        """In units that grow as weights decay, so that nothing is touched while time passes."""
        self._parents: dict[PrefixKey, PrefixKey | None] = {}
        self._total = 0.0
        self._origin_s = 0.0
        self._reports: dict[str, tuple[ShareReport, float]] = {}

    def record(self, keys: Sequence[PrefixKey], weight: float, now_s: float) -> None:
        """Count a request with these keys, shortest prefix first."""
        unit = self._unit(now_s)
        if unit > _RESCALE_AT:
            self._weights = {key: value / unit for key, value in self._weights.items()}
            self._total /= unit
            self._origin_s, unit = now_s, 1.0
        weight *= unit
        self._total += weight
        weights, parent = self._weights, None
        for key in keys[: self._depth_strides]:
            old = weights.get(key)
            if old is None:
                weights[key] = weight
                self._parents[key] = parent
            else:
                weights[key] = old + weight
            parent = key
        if len(weights) > 2 * self._limit:
            self._weights = dict(nlargest(self._limit, weights.items(), key=lambda item: item[1]))
            self._parents = {key: self._parents[key] for key in self._weights}

    def share(self, key: PrefixKey, now_s: float) -> float:
        """Return the share of all gateways' recent traffic that begins with `key`, 0 to 1."""
        weight, total = self._weights.get(key, 0.0) / self._unit(now_s), self._total / self._unit(now_s)
        for report, factor in self._others(now_s):
            weight += factor * sum(item.weight for item in report.keys if item.key == key)
            total += factor * report.total
        return weight / total if total > 0 else 0.0

    def popular(self, min_share: float, now_s: float) -> dict[PrefixKey, Popularity]:
        """Return every key with at least `min_share`."""
        unit = self._unit(now_s)
        weights: defaultdict[PrefixKey, float] = defaultdict(float)
        parents = dict(self._parents)
        for key, weight in self._weights.items():
            weights[key] = weight / unit
        total = self._total / unit
        for report, factor in self._others(now_s):
            total += factor * report.total
            for item in report.keys:
                weights[item.key] += factor * item.weight
                parents.setdefault(item.key, item.parent)
        if total <= 0:
            return {}
        shares = {key: weight / total for key, weight in weights.items() if weight >= min_share * total}
        own = dict(shares)
        for key, share in shares.items():
            parent = parents[key]
            if parent in own:
                own[parent] -= share
        return {key: Popularity(share, max(0.0, own[key])) for key, share in shares.items()}

    def export(self, now_s: float) -> ShareReport:
        """Return this gateway's own counters, for the others' `merge`."""
        unit = self._unit(now_s)
        heaviest = nlargest(self._limit, self._weights.items(), key=lambda item: item[1])
        keys = tuple(KeyWeight(key, self._parents[key], weight / unit) for key, weight in heaviest)
        return ShareReport(keys, self._total / unit)

    def merge(self, gateway_id: str, report: ShareReport, now_s: float) -> None:
        """Take another gateway's latest report in place of its previous one."""
        self._reports.pop(gateway_id, None)
        self._reports[gateway_id] = (report, now_s)
        for silent in [name for name, (_, at_s) in self._reports.items() if self._is_forgotten(at_s, now_s)]:
            del self._reports[silent]
        while len(self._reports) > _GATEWAYS_KEPT:
            del self._reports[next(iter(self._reports))]

    def _is_forgotten(self, at_s: float, now_s: float) -> bool:
        return now_s - at_s > _FORGOTTEN_AFTER * self._half_life_s

    def _others(self, now_s: float) -> list[tuple[ShareReport, float]]:
        """Return the other gateways' reports, each with its factor of decay since."""
        return [(report, 2 ** ((at_s - now_s) / self._half_life_s)) for report, at_s in self._reports.values()]

    def _unit(self, now_s: float) -> float:
        exponent = (now_s - self._origin_s) / self._half_life_s
        return float(2.0 ** min(exponent, 1000.0))
