"""Metrics by tenant. The tenants' file bounds the names; a tenant that leaves the file leaves here too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from router.telemetry.collectors import Distribution, FieldSeries, Tally, register
from router.telemetry.queue import QUEUE_BUCKETS_S


@dataclass(frozen=True, slots=True)
class TenantValues:
    """Values read when Prometheus scrapes."""

    limits_alone: bool = False
    usage_log_pending_bytes: int = 0
    usage_log_lost: int = 0


class TenantMetrics:
    """What each tenant does, what it gets, and what it is refused."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._known = {"default"}
        self._requests = Tally(
            "warmroute_gateway_tenant_requests", "Answers given, by tenant and HTTP status", ("tenant", "status")
        )
        self._tokens = Tally(
            "warmroute_gateway_tenant_tokens",
            "Tokens of requests that an engine began to serve: of prompts, those of them that were cached, and of "
            "answers; estimated if the engine did not say",
            ("tenant", "kind"),
        )
        self._refused = Tally(
            "warmroute_gateway_tenant_refused",
            "Requests refused because of their tenant: at a limit (requests, tokens, at_once), not allowed the model, "
            "or with an expired key",
            ("tenant", "reason"),
        )
        self._queued = Distribution(
            "warmroute_gateway_tenant_queue_seconds",
            "Seconds that requests waited in the gateway for a place on an engine",
            ("tenant",),
            QUEUE_BUCKETS_S,
        )
        register(registry, self._requests, self._tokens, self._refused, self._queued)
        self._fields = FieldSeries(
            registry,
            "warmroute_gateway_",
            gauges={
                "limits_alone": "1 while tenants' limits are kept without Redis, each gateway keeping its part",
                "usage_log_pending_bytes": "Bytes of the usage log that are not written yet",
            },
            counters={"usage_log_lost": "Lines of the usage log lost because it could not be written"},
        )

    def set(self, values: TenantValues) -> None:
        """Take the values of a scrape."""
        self._fields.set(values)

    def answered(self, tenant: str, status: int) -> None:
        """Count an answer."""
        if tenant in self._known:
            self._requests.counts[tenant, status] += 1

    def used(self, tenant: str, *, prompt: int, cached: int, output: int) -> None:
        """Count the tokens of a request."""
        if tenant not in self._known:
            return
        counts = self._tokens.counts
        counts[tenant, "prompt"] += prompt
        counts[tenant, "cached"] += cached
        counts[tenant, "output"] += output

    def refused(self, tenant: str, reason: str) -> None:
        """Count a refusal; `reason` is one of a fixed few."""
        if tenant in self._known:
            self._refused.counts[tenant, reason] += 1

    def queued(self, tenant: str, seconds: float) -> None:
        """Observe how long a request waited for a place."""
        if tenant in self._known:
            self._queued.observe(seconds, (tenant,))

    def keep(self, tenants: Iterable[str]) -> None:
        """Keep the series of these tenants, and forget all others."""
        kept = self._known = set(tenants)
        for tally in (self._requests, self._tokens, self._refused):
            for labels in [labels for labels in tally.counts if labels[0] not in kept]:
                del tally.counts[labels]
        self._queued.keep(lambda labels: labels[0] in kept)
