"""Count an ended request for its tenant, in the metrics and in the usage log."""

from __future__ import annotations

from router.forwarding.exchange import Exchange
from router.telemetry.tenants import TenantMetrics
from router.tenants.usage_log import UsageLog


class Accounts:
    """Counts every request that ends."""

    def __init__(self, metrics: TenantMetrics, usage_log: UsageLog | None) -> None:
        self._metrics = metrics
        self._usage_log = usage_log

    def ended(self, exchange: Exchange, endpoint: str, total_s: float) -> None:
        """Count a request. `total_s`: seconds from the request's arrival to its end."""
        name, inbound, usage = exchange.tenant.name, exchange.inbound, exchange.usage
        self._metrics.answered(name, exchange.status or 500)
        if inbound is None or not exchange.has_run:
            return
        prompt = inbound.prompt_tokens if usage.prompt_tokens is None else usage.prompt_tokens
        output = inbound.answer_tokens if usage.completion_tokens is None else usage.completion_tokens
        cached = usage.cached_tokens or 0
        self._metrics.used(name, prompt=prompt, cached=cached, output=output)
        if self._usage_log is None:
            return
        self._usage_log.add(
            {
                "request_id": exchange.request_id,
                "tenant": name,
                "endpoint": endpoint,
                "model": inbound.model,
                "status": exchange.status or 500,
                "prompt_tokens": prompt,
                "cached_tokens": cached,
                "completion_tokens": output,
                "estimated": [
                    field
                    for field, said in (
                        ("prompt_tokens", usage.prompt_tokens),
                        ("cached_tokens", usage.cached_tokens),
                        ("completion_tokens", usage.completion_tokens),
                    )
                    if said is None
                ],
                "seconds": round(total_s, 3),
            }
        )
