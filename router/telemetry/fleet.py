"""Metrics of the engines: which there are, and how they are found and read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from router.telemetry.collectors import FieldSeries, LabelledGauge, Tally, register


@dataclass(frozen=True, slots=True)
class FleetValues:
    """Values read when Prometheus scrapes."""

    pods_known: int
    pods_admitted: int
    ejections: int
    in_flight: Mapping[str, int]
    """By pod id."""
    ejected: Mapping[str, bool]
    """Whether it is ejected for failing requests, by pod id."""
    by_model: Mapping[str, int]
    """Engines that take requests, by model."""
    metrics_pauses_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds between two readings of an engine's metrics, by pod id."""
    metrics_reads: Mapping[str, int] = field(default_factory=dict)
    """By outcome."""


@dataclass(frozen=True, slots=True)
class DiscoveryValues:
    """Values read when Prometheus scrapes."""

    synced: bool
    sync_age_seconds: float
    """Seconds since the set of engines was last known to be complete; before the first time, since the start."""
    errors: int
    relists: Mapping[str, int]
    """By reason."""


class FleetMetrics:
    """Engines and their discovery."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._fields = FieldSeries(
            registry,
            "warmroute_gateway_",
            gauges={
                "pods_known": "Engines that were identified, ejected ones included",
                "pods_admitted": "Engines that take requests",
            },
            counters={"ejections": "Times that an engine was ejected because it only failed requests"},
        )
        self._discovery = FieldSeries(
            registry,
            "warmroute_gateway_discovery_",
            gauges={
                "synced": "1 once a complete set of engines was found",
                "sync_age_seconds": "Seconds since the set of engines was last known to be complete",
            },
            counters={"errors": "Failed attempts to find engines"},
        )
        self._relists = Tally(
            "warmroute_gateway_discovery_relists", "Complete listings of engines, by reason", ("reason",)
        )
        self._in_flight = LabelledGauge(
            "warmroute_gateway_engine_in_flight", "Requests of this gateway in flight on an engine", "engine"
        )
        self._ejected = LabelledGauge(
            "warmroute_gateway_engine_ejected",
            "1 while an engine that answers its probes is ejected because it only failed requests",
            "engine",
        )
        self._metrics_pauses = LabelledGauge(
            "warmroute_gateway_engine_metrics_pause_seconds",
            "Seconds between two readings of an engine's own metrics: more if they slow the engine down, or fail",
            "engine",
        )
        self._metrics_reads = Tally(
            "warmroute_gateway_engine_metrics_reads",
            "Readings of engines' own metrics (read: success, late: no answer within a second, failed: another error, "
            "protected: no key for them, none: no known metrics, odd: more than 4 MiB)",
            ("outcome",),
        )
        self._by_model = LabelledGauge(
            "warmroute_gateway_model_engines", "Engines that take requests for a known model", "model"
        )
        register(registry, self._relists, self._in_flight, self._ejected, self._by_model)
        register(registry, self._metrics_pauses, self._metrics_reads)

    def set(self, values: FleetValues, discovery: DiscoveryValues) -> None:
        """Take the values of a scrape."""
        self._fields.set(values)
        self._in_flight.values = values.in_flight
        self._ejected.values = values.ejected
        self._by_model.values = values.by_model
        self._metrics_pauses.values = values.metrics_pauses_s
        self._metrics_reads.take(values.metrics_reads)
        self._discovery.set(discovery)
        self._relists.take(discovery.relists)
