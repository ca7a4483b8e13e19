"""Metrics of what engines publish: the registry, and streams of KV events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from router.telemetry.collectors import FieldSeries, LabelledGauge, Tally, register


@dataclass(frozen=True, slots=True)
class RegistryValues:
    """Values read when Prometheus scrapes."""

    configured: bool
    connected: bool
    expired: bool
    pods_synced: int
    refused: int
    """Messages that were refused."""
    unknown: int
    """Messages of an unknown version."""


@dataclass(frozen=True, slots=True)
class KvEventValues:
    """Values read when Prometheus scrapes."""

    streams: Mapping[str, int] = field(default_factory=dict)
    """By state."""
    events: Mapping[str, int] = field(default_factory=dict)
    """By kind."""


class RegistryMetrics:
    """The registry of engines that publish, and KV events of those that send them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._fields = FieldSeries(
            registry,
            "warmroute_gateway_registry_",
            gauges={
                "configured": "1 if a Redis URL is set",
                "connected": "1 while Redis answers",
                "expired": "1 while every lease has run out",
                "pods_synced": "Pods whose registry entries are current",
            },
            counters={
                "refused": "Registry messages of engines that were refused whole: cut, or with absurd numbers",
                "unknown": "Registry messages of engines of another release that were skipped: their version is not "
                "known here",
            },
        )
        self._kv_events = Tally(
            "warmroute_gateway_kv_events",
            "What engines' streams of KV events brought: batches, blocks stored and removed, caches cleared; gaps, "
            "restarts, and times that an engine's contents had to be forgotten (lost); batches or events that were "
            "refused, or not known here; blocks whose beginning is not known (orphans)",
            ("what",),
        )
        self._kv_event_streams = LabelledGauge(
            "warmroute_gateway_kv_event_streams",
            "Engines whose KV events are to be followed, by state (following; waiting: for the first block of a "
            "request that this gateway sent; no_sessions: the engine is too old to tell a block's session; unheard: "
            "no connection, or missed batches are still being replayed)",
            "state",
        )
        register(registry, self._kv_events, self._kv_event_streams)

    def set(self, values: RegistryValues, kv_events: KvEventValues) -> None:
        """Take the values of a scrape."""
        self._fields.set(values)
        self._kv_events.take(kv_events.events)
        self._kv_event_streams.values = kv_events.streams
