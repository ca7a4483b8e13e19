"""Metrics of clients' connections, of what their requests hold, and of the log of requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from router.telemetry.collectors import FieldSeries, Tally, register

REFUSAL_REASONS = ("connections", "short", "busy", "handshake", "head", "write", "closing", "body", "idle")
"""Reasons for refused connections. Each is a series from the start, so that the first increase is seen."""


@dataclass(frozen=True, slots=True)
class ClientValues:
    """Values read when Prometheus scrapes."""

    in_flight: int
    body_bytes: int
    answer_bytes: int
    connections: int
    refused: Mapping[str, int]
    """By reason."""
    lacks: Mapping[str, int]
    """By name of the error."""
    log_lines_dropped: int = 0
    heavy_bodies: int = 0
    reader_processes_ended: int = 0


class ClientMetrics:
    """Clients' connections and requests in flight."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._fields = FieldSeries(
            registry,
            "warmroute_gateway_",
            gauges={
                "in_flight": "Requests in flight",
                "body_bytes": "Bytes of the bodies of requests in flight",
                "answer_bytes": "Bytes of answers that are kept until they are whole, or until their clients take them",
                "connections": "Connections of clients that are open",
            },
            counters={
                "log_lines_dropped": "Lines of the log that were not written, because nobody reads the log",
                "heavy_bodies": "Bodies that were read in the reader process, because they take long to read",
                "reader_processes_ended": "Reader processes that ended or hung",
            },
        )
        self._refused = Tally(
            "warmroute_gateway_connections_refused",
            "Connections of clients that were refused (connections: too many, short: see warmroute_gateway_lacks, "
            "busy: more came than the gateway's core can pass on), "
            "made room for another client while they had no request (idle), were cut because the client was late "
            "(handshake: for TLS, head: with a request's headers, write: to read an answer, closing: to close), or did "
            "not stop sending a refused body (body)",
            ("reason",),
        )
        self._refused.counts |= {(reason,): 0 for reason in REFUSAL_REASONS}
        self._lacks = Tally(
            "warmroute_gateway_lacks",
            "Connections that failed because this machine lacks descriptors, memory or ports, by error",
            ("error",),
        )
        register(registry, self._refused, self._lacks)

    def set(self, values: ClientValues) -> None:
        """Take the values of a scrape."""
        self._fields.set(values)
        self._refused.take(values.refused)
        self._lacks.take(values.lacks)
