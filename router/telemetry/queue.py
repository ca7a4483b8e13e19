"""Metrics of requests that wait in the gateway."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry

from router.telemetry.collectors import Distribution, LabelledGauge, Tally, register

QUEUE_BUCKETS_S = (0.01, 0.05, 0.25, 1.0, 5.0, 15.0, 60.0)


class QueueMetrics:
    """Requests that wait for an engine with room, and those that are refused."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._queue = Distribution(
            "warmroute_gateway_queue_seconds",
            "Seconds that requests waited for an engine with room; those that did not have to are not counted",
            (),
            QUEUE_BUCKETS_S,
        )
        self._refused = Tally(
            "warmroute_gateway_queue_refused",
            "Requests that were refused because they would have waited too long (late) or longer than their client "
            "allows (slo), had no place in the queue (full), lost their place to a more urgent request (shed), found "
            "no engine in time (asleep), or were waiting when the gateway stopped (stopping)",
            ("reason",),
        )
        self._waiting = LabelledGauge(
            "warmroute_gateway_queue_requests",
            "Requests for a known model that wait here because its engines are saturated, or because there are none",
            "model",
        )
        register(registry, self._queue, self._refused, self._waiting)

    def waited(self, seconds: float) -> None:
        """Observe how long a request waited for an engine with room, whether it got one or not."""
        self._queue.observe(seconds)

    def refused(self, reason: str) -> None:
        """Count a request that was refused because the engines are saturated."""
        self._refused.counts[reason,] += 1

    def set(self, waiting: Mapping[str, int]) -> None:
        """Take the requests that wait, by model."""
        self._waiting.values = waiting
