"""Metrics of attempts on engines that failed, broke, or had a second one beside them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from router.telemetry.collectors import Tally, register

BROKEN_THEN = ("resumed", "ended", "failed", "off", "request", "answer", "size", "engine")
"""What may follow a broken stream. Each is a series from the start, so that the first increase is seen."""
HEDGE_OUTCOMES = ("won", "lost", "refused")


class AttemptMetrics:
    """Retries, broken streams, second engines."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._then = Tally(
            "warmroute_gateway_broken_attempts",
            "Streams that an engine broke after their first byte, by what followed for the client (resumed: the rest "
            "from another engine, ended: no token was missing, failed: no other engine gave the rest; off: not "
            "enabled; request, answer, size, engine: why no other engine was asked)",
            ("then",),
        )
        self._then.counts |= {(then,): 0 for then in BROKEN_THEN}
        self._hedges = Tally(
            "warmroute_gateway_hedges",
            "Requests whose first engine was silent for so long that a second one was due, by the second one's outcome "
            "(won: its answer was passed on, lost: the first engine's was, or none was; refused: it was not asked, "
            "because no other engine had room, or 2 % of requests had a second engine already)",
            ("outcome",),
        )
        self._hedges.counts |= {(outcome,): 0 for outcome in HEDGE_OUTCOMES}
        register(registry, self._then, self._hedges)
        self._retries = Counter(
            "warmroute_gateway_retries", "Attempts that failed before the first byte", ("reason",), registry=registry
        )
        self._retries_refused = Counter(
            "warmroute_gateway_retries_refused",
            "Further attempts that were not made because too many were under way: a fifth of the requests in flight",
            registry=registry,
        )
        self._broken = Counter(
            "warmroute_gateway_broken_streams", "Answers that broke after their first byte", registry=registry
        )

    def retried(self, reason: str) -> None:
        """Count an attempt that failed before the first byte."""
        self._retries.labels(reason).inc()

    def retry_refused(self) -> None:
        """Count a further attempt that the budget did not allow."""
        self._retries_refused.inc()

    def hedged(self, outcome: str) -> None:
        """Count a request whose first pod was silent for long, by the outcome of its second pod."""
        self._hedges.counts[outcome,] += 1

    def attempt_broke(self, then: str) -> None:
        """Count a stream that a pod broke, by what followed."""
        self._then.counts[then,] += 1

    def broke(self) -> None:
        """Count an answer that broke after its first byte."""
        self._broken.inc()
