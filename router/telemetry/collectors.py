"""Counters and histograms that are cheap to update: the library's take a lock, and cost five times as much."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

Labels = tuple[str | int, ...]


class Tally(Collector):
    """A counter with labels."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self._about = (name, text)
        self._labels = labels
        self.counts: defaultdict[Labels, int] = defaultdict(int)

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        family = CounterMetricFamily(*self._about, labels=self._labels)
        for labels, count in self.counts.items():
            family.add_metric([str(label) for label in labels], count)
        yield family


class Distribution(Collector):
    """A histogram with labels; otherwise like `Tally`."""

    def __init__(self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]) -> None:
        """`buckets`: upper bounds, lowest first, without infinity."""
        self._about = (name, text)
        self._labels = labels
        self._bounds = buckets
        self._counts: dict[Labels, list[int]] = {}
        """Observations in each bucket, not cumulative."""
        self._sums: dict[Labels, float] = {}
        if not labels:
            self._add(())

    def _add(self, labels: Labels) -> list[int]:
        self._sums[labels] = 0.0
        self._counts[labels] = [0] * (len(self._bounds) + 1)
        return self._counts[labels]

    def observe(self, value: float, labels: Labels = ()) -> None:
        """Count one value."""
        counts = self._counts.get(labels) or self._add(labels)
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def counted(self) -> list[int]:
        """Return the observations in each bucket over all labels; the last bucket has no upper bound."""
        return [sum(counts) for counts in zip(*self._counts.values(), strict=True)] or [0] * (len(self._bounds) + 1)

    def keep(self, is_kept: Callable[[Labels], bool]) -> None:
        """Forget the series whose labels `is_kept` rejects."""
        for labels in [labels for labels in self._counts if not is_kept(labels)]:
            del self._counts[labels], self._sums[labels]

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        family = HistogramMetricFamily(*self._about, labels=self._labels)
        bounds = [*map(repr, self._bounds), "+Inf"]
        for labels, counts in self._counts.items():
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric([str(label) for label in labels], buckets, self._sums[labels])
        yield family
