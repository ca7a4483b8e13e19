"""Prometheus metrics of the gateway. Labels are bounded: policies are a fixed list, pods leave with the fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

TTFB_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
DECISION_BUCKETS_S = (2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 0.01)


@dataclass(frozen=True, slots=True)
class GaugeValues:
    """What is read at the moment of a scrape."""

    in_flight: int
    pods_known: int
    pods_admitted: int
    registry_configured: bool
    registry_connected: bool
    registry_expired: bool
    registry_pods_synced: int


class Metrics:
    """The gateway's metrics, in a registry of their own."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "warmroute_gateway_requests",
            "Answers given, by policy, pod (empty: none) and HTTP status",
            ("policy", "pod", "status"),
            registry=registry,
        )
        self._first_byte = Histogram(
            "warmroute_gateway_first_byte_seconds",
            "Seconds from a request's arrival to the first byte of its answer",
            ("policy",),
            buckets=TTFB_BUCKETS_S,
            registry=registry,
        )
        self._decision = Histogram(
            "warmroute_gateway_decision_seconds",
            "Seconds to compute keys, match them and choose a pod",
            buckets=DECISION_BUCKETS_S,
            registry=registry,
        )
        self._tokens = Counter(
            "warmroute_gateway_tokens",
            "Tokens of answered requests whose pod reported them: prompt, cached, and cached as predicted",
            ("policy", "kind"),
            registry=registry,
        )
        self._retries = Counter(
            "warmroute_gateway_retries", "Attempts that failed before the first byte", ("reason",), registry=registry
        )
        self._broken = Counter(
            "warmroute_gateway_broken_streams", "Answers that broke after their first byte", registry=registry
        )
        self._fallbacks = Counter(
            "warmroute_gateway_registry_fallbacks",
            "Requests routed by bounded_hash because every registry lease had run out",
            registry=registry,
        )
        self._gauges = {
            name: Gauge(f"warmroute_gateway_{name}", text, registry=registry)
            for name, text in (
                ("in_flight", "Requests in flight"),
                ("pods_known", "Engines that were identified, ejected ones included"),
                ("pods_admitted", "Engines that take requests"),
                ("registry_configured", "1 where a Redis URL is set"),
                ("registry_connected", "1 while Redis answers"),
                ("registry_expired", "1 while every lease has run out"),
                ("registry_pods_synced", "Pods whose registry entries are current"),
            )
        }
        self._seen: dict[tuple[str, str, int], Counter] = {}
        self._by_policy: dict[str, tuple[Histogram, Counter, Counter, Counter]] = {}

    def answered(self, policy: str, pod: str, status: int) -> None:
        """Count one answer to a client."""
        key = (policy, pod, status)
        child = self._seen.get(key)
        if child is None:
            child = self._seen[key] = self._requests.labels(policy, pod, str(status))
        child.inc()

    def first_byte(self, policy: str, seconds: float) -> None:
        """Observe the time to the first byte of an answer."""
        self._children(policy)[0].observe(seconds)

    def cached(self, policy: str, *, prompt_tokens: int, cached_tokens: int, predicted_tokens: int) -> None:
        """Count a request's prompt tokens, those reused, and those expected to be."""
        _, prompt, cached, predicted = self._children(policy)
        prompt.inc(prompt_tokens)
        cached.inc(cached_tokens)
        predicted.inc(predicted_tokens)

    def decided(self, seconds: float) -> None:
        """Observe the time of one decision."""
        self._decision.observe(seconds)

    def retried(self, reason: str) -> None:
        """Count an attempt that failed before the first byte."""
        self._retries.labels(reason).inc()

    def broke(self) -> None:
        """Count an answer that broke after its first byte."""
        self._broken.inc()

    def fell_back(self) -> None:
        """Count a request routed without the registry because it had expired."""
        self._fallbacks.inc()

    def keep_pods(self, pods: Iterable[str]) -> None:
        """Forget the counters of pods not among `pods`, so that labels stay bounded."""
        keep = {"", *pods}
        for key in [key for key in self._seen if key[1] not in keep]:
            del self._seen[key]
            self._requests.remove(key[0], key[1], str(key[2]))

    def render(self, values: GaugeValues) -> bytes:
        """The exposition text."""
        for name, gauge in self._gauges.items():
            gauge.set(getattr(values, name))
        return generate_latest(self._registry)

    def _children(self, policy: str) -> tuple[Histogram, Counter, Counter, Counter]:
        children = self._by_policy.get(policy)
        if children is None:
            tokens: Callable[[str], Counter] = lambda kind: self._tokens.labels(policy, kind)  # noqa: E731
            children = (self._first_byte.labels(policy), tokens("prompt"), tokens("cached"), tokens("predicted"))
            self._by_policy[policy] = children
        return children
