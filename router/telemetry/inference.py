"""Metrics of the Gateway API Inference Extension's objects, for gateways that follow them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class InferenceValues:
    """Values read when Prometheus scrapes. None: nothing of the kind is followed, and there is no series."""

    pool_valid: bool | None = None
    objectives: int | None = None


class InferenceMetrics(Collector):
    """`warmroute_gateway_inference_*`, from the last `values`."""

    def __init__(self) -> None:
        self.values = InferenceValues()

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        for name, text, value in (
            (
                "pool_valid",
                "1 while the InferencePool exists and is valid; at 0 the last valid one is followed",
                self.values.pool_valid,
            ),
            ("objectives", "InferenceObjectives of the pool that requests may name", self.values.objectives),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"warmroute_gateway_inference_{name}", text, float(value))
