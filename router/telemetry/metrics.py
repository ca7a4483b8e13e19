"""Prometheus metrics of the gateway. Labels are bounded: policies are a fixed list, and an engine's series end when it
leaves the fleet.

The label of an engine is `engine`, not `pod`: when Prometheus scrapes in Kubernetes, `pod` is the gateway's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Metric, generate_latest

from router.telemetry.answers import TTFB_BUCKETS_S, AnswerMetrics
from router.telemetry.attempts import AttemptMetrics
from router.telemetry.clients import ClientMetrics, ClientValues
from router.telemetry.decisions import DecisionMetrics
from router.telemetry.fleet import DiscoveryValues, FleetMetrics, FleetValues
from router.telemetry.inference import InferenceMetrics, InferenceValues
from router.telemetry.peer_sync import PeerSyncValues, peer_sync_series
from router.telemetry.queue import QueueMetrics
from router.telemetry.registry import KvEventValues, RegistryMetrics, RegistryValues
from router.telemetry.shadows import ShadowMetrics
from router.telemetry.tenants import TenantMetrics, TenantValues
from router.telemetry.totals import Totals


@dataclass(frozen=True, slots=True)
class ScrapedValues:
    """Values read when Prometheus scrapes, by subject."""

    clients: ClientValues
    fleet: FleetValues
    discovery: DiscoveryValues
    registry: RegistryValues
    waiting: Mapping[str, int]
    """Requests that wait, by model."""
    kv_events: KvEventValues = field(default_factory=KvEventValues)
    peer_sync: PeerSyncValues = field(default_factory=PeerSyncValues)
    """About other gateways; all zero if nothing is shared."""
    tenants: TenantValues = field(default_factory=TenantValues)
    inference: InferenceValues = field(default_factory=InferenceValues)


class Metrics:
    """The gateway's metrics by subject, in a separate registry."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.answers = AnswerMetrics(self._registry)
        self.decisions = DecisionMetrics(self._registry)
        self.shadows = ShadowMetrics(self._registry)
        self.queue = QueueMetrics(self._registry)
        self.attempts = AttemptMetrics(self._registry)
        self.tenants = TenantMetrics(self._registry)
        self._clients = ClientMetrics(self._registry)
        self._fleet = FleetMetrics(self._registry)
        self._engines = RegistryMetrics(self._registry)
        self._peer_sync = peer_sync_series(self._registry)
        self._inference = InferenceMetrics()
        self._registry.register(self._inference)

    def totals(self) -> Totals:
        """Return the sums of what was counted since the start."""
        answers, errors, by_engine = self.answers.totals()
        return Totals(
            answers,
            errors,
            by_engine,
            self.decisions.tokens(),
            TTFB_BUCKETS_S,
            self.answers.first_bytes(),
            self.shadows.totals(),
        )

    def render(self, values: ScrapedValues) -> bytes:
        """Return the exposition text."""
        self._take(values)
        return generate_latest(self._registry)

    def families(self, values: ScrapedValues) -> list[Metric]:
        """Return the same numbers for another format. They do not change afterwards."""
        self._take(values)
        return list(self._registry.collect())

    def _take(self, values: ScrapedValues) -> None:
        self._clients.set(values.clients)
        self._fleet.set(values.fleet, values.discovery)
        self._engines.set(values.registry, values.kv_events)
        self._peer_sync.set(values.peer_sync)
        self._inference.values = values.inference
        self.queue.set(values.waiting)
        self.tenants.set(values.tenants)
