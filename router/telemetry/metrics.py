"""Prometheus metrics of the gateway. Labels are bounded: policies are a fixed list, engines leave with the fleet.

An engine is called `engine` and not `pod`: that label is the gateway's own where Prometheus scrapes in Kubernetes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

Labels = tuple[str | int, ...]

TTFB_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
TTFT_ERROR_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
DECISION_BUCKETS_S = (2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 0.01)


@dataclass(frozen=True, slots=True)
class GaugeValues:
    """What is read at the moment of a scrape."""

    in_flight: int
    pods_known: int
    pods_admitted: int
    engine_in_flight: Mapping[str, int]
    """By pod id."""
    engine_ejected: Mapping[str, bool]
    """Whether for failing requests, by pod id."""
    ejections: int
    model_engines: Mapping[str, int]
    """Engines that take requests, by model."""
    discovery_synced: bool
    discovery_sync_age_seconds: float
    """Since the last time that the set of engines was known to be the whole truth; since the start before the first."""
    discovery_errors: int
    discovery_relists: Mapping[str, int]
    """By reason."""
    registry_configured: bool
    registry_connected: bool
    registry_expired: bool
    registry_pods_synced: int


class Tally(Collector):
    """A counter by labels. What a request counts is kept here: the library's own counters lock, and cost five times."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self._about = (name, text)
        self._labels = labels
        self.counts: defaultdict[Labels, int] = defaultdict(int)

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        family = CounterMetricFamily(*self._about, labels=self._labels)
        for labels, count in self.counts.items():
            family.add_metric([str(label) for label in labels], count)
        yield family


class Distribution(Collector):
    """A histogram by labels; as `Tally`."""

    def __init__(self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]) -> None:
        """`buckets`: upper bounds, lowest first, without infinity."""
        self._about = (name, text)
        self._labels = labels
        self._bounds = buckets
        self._counts: dict[Labels, list[int]] = {}
        """Observations in each bucket, not cumulative."""
        self._sums: dict[Labels, float] = {}
        if not labels:
            self._add(())

    def _add(self, labels: Labels) -> list[int]:
        self._sums[labels] = 0.0
        self._counts[labels] = [0] * (len(self._bounds) + 1)
        return self._counts[labels]

    def observe(self, value: float, labels: Labels = ()) -> None:
        """One more value."""
        counts = self._counts.get(labels) or self._add(labels)
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def collect(self) -> Iterable[Metric]:
        """See `Collector`."""
        family = HistogramMetricFamily(*self._about, labels=self._labels)
        bounds = [*map(repr, self._bounds), "+Inf"]
        for labels, counts in self._counts.items():
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric([str(label) for label in labels], buckets, self._sums[labels])
        yield family


class Metrics:
    """The gateway's metrics, in a registry of their own."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Tally(
            "warmroute_gateway_requests",
            "Answers given, by policy, engine (empty: none) and HTTP status",
            ("policy", "engine", "status"),
        )
        self._first_byte = Distribution(
            "warmroute_gateway_first_byte_seconds",
            "Seconds from a request's arrival to the first byte of its answer",
            ("policy",),
            TTFB_BUCKETS_S,
        )
        self._decision = Distribution(
            "warmroute_gateway_decision_seconds",
            "Seconds to match a request's keys, look at the pods, choose one and remember it",
            (),
            DECISION_BUCKETS_S,
        )
        self._tokens = Tally(
            "warmroute_gateway_tokens",
            "Tokens of answered requests whose pod reported them: prompt, cached, and cached as predicted",
            ("policy", "kind"),
        )
        self._ttft_error = Distribution(
            "warmroute_gateway_ttft_error_seconds",
            "Seconds by which the first byte of a stream came later or earlier than the policy had predicted",
            ("direction",),
            TTFT_ERROR_BUCKETS_S,
        )
        self._shadow_decisions = Tally(
            "warmroute_gateway_shadow_decisions",
            "Requests on which a shadow policy was asked, by the policy that acted, and whether the shadow policy "
            "chose the same engine, another, or failed",
            ("policy", "shadow", "outcome"),
        )
        self._shadow_tokens = Tally(
            "warmroute_gateway_shadow_tokens",
            "Prompt tokens of requests on which a shadow policy was asked, and those believed cached on the engine of "
            "the acting and of the shadow policy",
            ("policy", "shadow", "kind"),
        )
        self._shadow_ttft = Distribution(
            "warmroute_gateway_shadow_ttft_seconds",
            "Seconds to the first token predicted for the engine of the acting and of the shadow policy",
            ("policy", "shadow", "choice"),
            TTFB_BUCKETS_S,
        )
        self._shadow_time = Distribution(
            "warmroute_gateway_shadow_seconds",
            "Seconds to ask all shadow policies about one request, after its decision",
            (),
            DECISION_BUCKETS_S,
        )
        self._unserved = Tally(
            "warmroute_gateway_unserved", "Requests for a known model that no engine served at the moment", ("model",)
        )
        self._unauthorized = Tally("warmroute_gateway_unauthorized", "Requests without a valid API key", ())
        self._unauthorized.counts[()] = 0
        self._ejections = Tally(
            "warmroute_gateway_ejections", "Times that an engine was ejected because it only failed requests", ()
        )
        self._discovery_errors = Tally("warmroute_gateway_discovery_errors", "Failed looks for engines", ())
        self._relists = Tally(
            "warmroute_gateway_discovery_relists", "Complete looks for engines, by what led to them", ("reason",)
        )
        for collector in (
            *(self._requests, self._first_byte, self._decision, self._tokens, self._ttft_error),
            *(self._shadow_decisions, self._shadow_tokens, self._shadow_ttft, self._shadow_time),
            *(self._unserved, self._unauthorized, self._ejections, self._discovery_errors, self._relists),
        ):
            registry.register(collector)
        self._engine_in_flight = Gauge(
            "warmroute_gateway_engine_in_flight",
            "Requests in flight on an engine, from here",
            ("engine",),
            registry=registry,
        )
        self._engine_ejected = Gauge(
            "warmroute_gateway_engine_ejected",
            "1 while an engine that answers its probes is ejected because it only failed requests",
            ("engine",),
            registry=registry,
        )
        self._model_engines = Gauge(
            "warmroute_gateway_model_engines",
            "Engines that take requests for a known model",
            ("model",),
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
                ("discovery_synced", "1 once a complete set of engines was found"),
                ("discovery_sync_age_seconds", "Seconds since the set of engines was last known to be complete"),
                ("registry_configured", "1 where a Redis URL is set"),
                ("registry_connected", "1 while Redis answers"),
                ("registry_expired", "1 while every lease has run out"),
                ("registry_pods_synced", "Pods whose registry entries are current"),
            )
        }

    def answered(self, policy: str, pod: str, status: int) -> None:
        """Count one answer to a client."""
        self._requests.counts[policy, pod, status] += 1

    def first_byte(self, policy: str, seconds: float) -> None:
        """Observe the time to the first byte of an answer."""
        self._first_byte.observe(seconds, (policy,))

    def cached(self, policy: str, *, prompt_tokens: int, cached_tokens: int, predicted_tokens: int) -> None:
        """Count a request's prompt tokens, those reused, and those expected to be."""
        counts = self._tokens.counts
        counts[policy, "prompt"] += prompt_tokens
        counts[policy, "cached"] += cached_tokens
        counts[policy, "predicted"] += predicted_tokens

    def decided(self, seconds: float) -> None:
        """Observe the time of one decision."""
        self._decision.observe(seconds)

    def shadowed(
        self,
        policy: str,
        shadow: str,
        *,
        is_same: bool,
        prompt_tokens: int,
        cached_tokens: tuple[int, int],
        ttft_s: tuple[float, float],
    ) -> None:
        """Count a request on which both policies chose; the pairs are of the choice of `policy`, then of `shadow`'s."""
        outcomes, tokens = self._shadow_decisions.counts, self._shadow_tokens.counts
        outcomes[policy, shadow, "same"] += is_same
        outcomes[policy, shadow, "other"] += not is_same
        tokens[policy, shadow, "prompt"] += prompt_tokens
        for choice, cached, seconds in zip(("acting", "shadow"), cached_tokens, ttft_s, strict=True):
            tokens[policy, shadow, choice] += cached
            self._shadow_ttft.observe(seconds, (policy, shadow, choice))

    def shadow_failed(self, policy: str, shadow: str) -> None:
        """Count a request on which a shadow policy failed."""
        self._shadow_decisions.counts[policy, shadow, "failed"] += 1

    def compared_shadows(self, seconds: float) -> None:
        """Observe the time of asking all shadow policies."""
        self._shadow_time.observe(seconds)

    def predicted(self, predicted_s: float, actual_s: float) -> None:
        """Observe what a predicted time to the first byte was worth."""
        error_s = actual_s - predicted_s
        self._ttft_error.observe(abs(error_s), ("late",) if error_s > 0 else ("early",))

    def unserved(self, model: str) -> None:
        """Count a request for a known model that no engine serves. Give no name that a client made up."""
        self._unserved.counts[model,] += 1

    def unauthorized(self) -> None:
        """Count a request without a valid key."""
        self._unauthorized.counts[()] += 1

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
        for labels in [labels for labels in self._requests.counts if labels[1] not in keep]:
            del self._requests.counts[labels]

    def render(self, values: GaugeValues) -> bytes:
        """The exposition text."""
        for name, gauge in self._gauges.items():
            gauge.set(getattr(values, name))
        for family, counts in (
            (self._engine_in_flight, values.engine_in_flight),
            (self._engine_ejected, values.engine_ejected),
            (self._model_engines, values.model_engines),
        ):
            family.clear()
            for label, count in counts.items():
                family.labels(label).set(count)
        self._ejections.counts[()] = values.ejections
        self._discovery_errors.counts[()] = values.discovery_errors
        self._relists.counts.update({(reason,): count for reason, count in values.discovery_relists.items()})
        return generate_latest(self._registry)
