"""Converts Prometheus' metrics to OpenTelemetry's and sends them over OTLP.

It is imported only if metrics are turned on. Names, labels and numbers are those of `/metrics`. A counter's name lacks
`_total`, as in OpenTelemetry; Prometheus adds it again when it receives OTLP.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from engine.common.otel.environment import GRPC
from engine.common.otel.sdk import needs_grpc
from engine.common.settings import ConfigError
from engine.common.version import program_version

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.resources import Resource
    from prometheus_client import Metric as Family
    from prometheus_client.samples import Sample

_UNKNOWN: Any = None
"""A histogram's least and greatest value: Prometheus does not keep them, so the fields are left out."""


class MetricExport:
    """Sends metrics. All methods block, and only one thread at a time may call them."""

    def __init__(self, protocol: str, resource: Resource) -> None:
        """Does not connect yet. Raises ConfigError."""
        self._resource = resource
        self._scope = InstrumentationScope("warmroute", program_version())
        self._started_ns = time.time_ns()
        try:
            self._exporter = _exporter(protocol)
        except (ValueError, OSError) as error:
            raise ConfigError(f"metrics cannot be sent as the OTEL_* variables ask: {error}") from None

    def send(self, families: Iterable[Family], at_ns: int) -> None:
        """Send the metrics' values at `at_ns` (nanoseconds since 1970). The SDK logs a failure."""
        metrics = [metric for family in families if (metric := self._metric(family, at_ns)) is not None]
        scopes = [ScopeMetrics(self._scope, metrics, "")]
        self._exporter.export(MetricsData([ResourceMetrics(self._resource, scopes, "")]))

    def close(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()

    def _metric(self, family: Family, at_ns: int) -> Metric | None:
        """Return the metric, or None if it has no samples yet or is of a kind that neither program uses."""
        began_ns, cumulative = self._started_ns, AggregationTemporality.CUMULATIVE
        data: Sum | Gauge | Histogram
        if family.type == "histogram":
            points = [
                _histogram(labels, samples, began_ns, at_ns) for labels, samples in _by_labels(family.samples).items()
            ]
            data = Histogram(points, cumulative)
        elif family.type == "counter":
            totals = [sample for sample in family.samples if sample.name.endswith("_total")]
            data = Sum([_number(sample, began_ns, at_ns) for sample in totals], cumulative, is_monotonic=True)
        elif family.type == "gauge":
            data = Gauge([_number(sample, 0, at_ns) for sample in family.samples])
        else:
            return None
        return Metric(family.name, family.documentation, "", data) if data.data_points else None


def _number(sample: Sample, began_ns: int, at_ns: int) -> NumberDataPoint:
    return NumberDataPoint(dict(sample.labels), began_ns, at_ns, sample.value)


def _by_labels(samples: Iterable[Sample]) -> Mapping[tuple[tuple[str, str], ...], list[Sample]]:
    """Return a histogram's samples by series, that is, by all labels except the bucket's bound."""
    found: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in samples:
        labels = tuple((name, value) for name, value in sample.labels.items() if name != "le")
        found.setdefault(labels, []).append(sample)
    return found


def _histogram(
    labels: tuple[tuple[str, str], ...], samples: Iterable[Sample], began_ns: int, at_ns: int
) -> HistogramDataPoint:
    """Prometheus' buckets count all values up to their bound. Here each counts only those above the previous bound."""
    buckets = sorted((float(one.labels["le"]), round(one.value)) for one in samples if one.name.endswith("_bucket"))
    total = sum(one.value for one in samples if one.name.endswith("_sum"))
    upto = [count for _, count in buckets]
    return HistogramDataPoint(
        attributes=dict(labels),
        start_time_unix_nano=began_ns,
        time_unix_nano=at_ns,
        count=upto[-1],
        sum=total,
        bucket_counts=[count - before for count, before in zip(upto, [0, *upto], strict=False)],
        explicit_bounds=[bound for bound, _ in buckets if bound != math.inf],
        min=_UNKNOWN,
        max=_UNKNOWN,
    )


def _exporter(protocol: str) -> MetricExporter:
    if protocol == GRPC:
        try:
            from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as OverGrpc
        except ImportError:
            raise needs_grpc("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL") from None
        return OverGrpc()
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as OverHttp

    return OverHttp()
