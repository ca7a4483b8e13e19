"""Counters and histograms that are cheap to update: the library's take a lock, and cost five times as much. And series
whose values another object holds, which are read when Prometheus scrapes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Gauge, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

Labels = tuple[str | int, ...]


class Tally(Collector):
    """A counter with labels."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self._about = (name, text)
        self._labels = labels
        self.counts: defaultdict[Labels, int] = defaultdict(int)

    def take(self, counts: Mapping[str, int]) -> None:
        """Take what is counted elsewhere, by the only label."""
        self.counts.update({(label,): count for label, count in counts.items()})

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


class LabelledGauge(Collector):
    """A gauge with one label, whose values are read when Prometheus scrapes."""

    def __init__(self, name: str, text: str, label: str) -> None:
        self._about = (name, text)
        self._label = label
        self.values: Mapping[str, float] = {}

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        family = GaugeMetricFamily(*self._about, labels=[self._label])
        for label, value in self.values.items():
            family.add_metric([label], float(value))  # not a truth value, which the SDK cannot send
        yield family


class FieldSeries:
    """Series that show an object's fields: each has the name of a field behind `prefix`."""

    def __init__(
        self,
        registry: CollectorRegistry,
        prefix: str,
        *,
        gauges: Mapping[str, str],
        counters: Mapping[str, str] | None = None,
    ) -> None:
        """`gauges` and `counters`: from field to text."""
        self._gauges = {name: Gauge(prefix + name, text, registry=registry) for name, text in gauges.items()}
        self._tallies = {name: Tally(prefix + name, text, ()) for name, text in (counters or {}).items()}
        register(registry, *self._tallies.values())

    def set(self, values: object) -> None:
        """Take the fields of a scrape."""
        for name, gauge in self._gauges.items():
            gauge.set(getattr(values, name))
        for name, tally in self._tallies.items():
            tally.counts[()] = getattr(values, name)


def register(registry: CollectorRegistry, *collectors: Collector) -> None:
    """Add the collectors to the registry."""
    for collector in collectors:
        registry.register(collector)
