"""Metrics of what gateways tell each other about engines that publish nothing."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from router.telemetry.collectors import FieldSeries


@dataclass(frozen=True, slots=True)
class PeerSyncValues:
    """Values read when Prometheus scrapes."""

    gateways: int = 0
    connected: bool = False
    engines: int = 0
    in_flight: int = 0
    waiting: int = 0
    lag_seconds: float = 0.0
    sent: int = 0
    sent_bytes: int = 0
    written: int = 0
    heard: int = 0
    refused: int = 0
    unknown: int = 0
    lost: int = 0
    gaps: int = 0


_GAUGES = {
    "gateways": "Peer gateways that were heard in the last ten minutes and have not stopped",
    "connected": "1 while this gateway hears the others through Redis",
    "engines": "Engines about which other gateways told something",
    "in_flight": "Requests of other gateways that are in flight on engines that publish nothing",
    "waiting": "Events that wait to be sent to the other gateways",
    "lag_seconds": "Seconds from the sending of the last message to its reading",
}
_COUNTERS = {
    "sent": "Messages to the other gateways",
    "sent_bytes": "Bytes of the messages to the other gateways",
    "written": "Times that all beliefs about an engine were written to Redis",
    "heard": "Messages from the other gateways",
    "refused": "Messages from the other gateways refused whole: cut, with absurd numbers, or with another stride",
    "unknown": "Messages from gateways of another release that were skipped: their version is not known here",
    "lost": "Events that could not be sent one by one, because Redis was down for long or too slow",
    "gaps": "Times that messages of another gateway were missing",
}


def peer_sync_series(registry: CollectorRegistry) -> FieldSeries:
    """Return `warmroute_gateway_beliefs_*`, which show `PeerSyncValues`."""
    return FieldSeries(registry, "warmroute_gateway_beliefs_", gauges=_GAUGES, counters=_COUNTERS)
