"""The gateway's metrics, and what they show of its parts at one moment."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, Metric

from engine.common.log_writer import STDERR
from router.edge.admission import Admission
from router.edge.connection_limits import ClientConnections
from router.fleet.discovery import DiscoveryStatus
from router.fleet.fleet import Fleet
from router.fleet.lack import Lacks
from router.fleet.scrape import Scraper
from router.peer_sync.reader import PeerSyncStatus
from router.reading.reader_process import BodyReader
from router.registry.reader import RegistryStatus
from router.telemetry.clients import ClientValues
from router.telemetry.fleet import DiscoveryValues, FleetValues
from router.telemetry.metrics import Metrics, ScrapedValues
from router.telemetry.peer_sync import PeerSyncValues
from router.telemetry.registry import RegistryValues
from router.telemetry.tenants import TenantValues
from router.tenants.limiter import Limiter
from router.tenants.usage_log import UsageLog


class Exposition:
    """Handler of `/metrics`. `read` returns the values of this moment."""

    def __init__(self, metrics: Metrics, read: Callable[[], ScrapedValues]) -> None:
        self._metrics = metrics
        self._read = read

    async def page(self, request: web.Request) -> web.Response:
        """Answer with the metrics as Prometheus text."""
        text = self._metrics.render(self._read())
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    def families(self) -> list[Metric]:
        """Return the metrics, for another format."""
        return self._metrics.families(self._read())


def client_values(
    admission: Admission, connections: ClientConnections, lacks: Lacks, reader: BodyReader
) -> ClientValues:
    """Return what clients' connections and requests hold, and what the log lost."""
    return ClientValues(
        in_flight=admission.in_flight,
        body_bytes=admission.body_bytes,
        answer_bytes=admission.answer_bytes,
        connections=len(connections.open),
        refused=connections.refused,
        lacks=lacks.counts,
        log_lines_dropped=STDERR.dropped,
        heavy_bodies=reader.heavy,
        reader_processes_ended=reader.ended,
    )


def fleet_values(fleet: Fleet, scraper: Scraper | None) -> FleetValues:
    """Return the engines that were identified."""
    members = [(member, member.pod) for member in fleet.members() if member.pod is not None]
    pods = [pod for member, _ in members for pod in member.pods]
    return FleetValues(
        pods_known=len(members),
        pods_admitted=len(fleet.admitted()),
        ejections=fleet.ejections,
        in_flight={pod.pod_id: pod.in_flight for pod in pods},
        ejected={pod.pod_id: pod.faults.is_ejected for pod in pods},
        by_model=fleet.engines_by_model(),
        metrics_pauses_s={
            pod.identity.pod_id: reading.every_s
            for member, pod in members
            if scraper is not None and (reading := scraper.status(member.url)) is not None
        },
        metrics_reads={} if scraper is None else scraper.counts,
    )


def discovery_values(status: DiscoveryStatus, sync_age_s: float) -> DiscoveryValues:
    """Return how engines are found."""
    return DiscoveryValues(status.synced_at_s is not None, sync_age_s, status.errors, status.relists)


def registry_values(status: RegistryStatus, *, is_configured: bool) -> RegistryValues:
    """Return what engines publish to the registry."""
    return RegistryValues(
        is_configured, status.connected, status.expired, status.pods_synced, status.refused, status.unknown
    )


def tenant_values(limiter: Limiter, usage_log: UsageLog | None) -> TenantValues:
    """Return whether limits are shared, and what the usage log still has to write."""
    if usage_log is None:
        return TenantValues(limiter.is_alone)
    return TenantValues(limiter.is_alone, usage_log.pending_bytes, usage_log.lost)


def peer_sync_values(status: PeerSyncStatus) -> PeerSyncValues:
    """Return what other gateways tell."""
    return PeerSyncValues(
        gateways=len(status.gateways),
        connected=status.connected,
        engines=status.pods,
        in_flight=sum(other.in_flight for other in status.gateways),
        waiting=status.waiting,
        lag_seconds=status.lag_s,
        sent=status.sent,
        sent_bytes=status.sent_bytes,
        written=status.written,
        heard=status.heard,
        refused=status.refused,
        unknown=status.unknown,
        lost=status.lost,
        gaps=status.gaps,
    )
