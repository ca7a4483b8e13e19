"""Prometheus metrics of the gateway. Labels are bounded: policies are a fixed list, and an engine's series end when it
leaves the fleet.

The label of an engine is `engine`, not `pod`: when Prometheus scrapes in Kubernetes, `pod` is the gateway's own.
"""

from __future__ import annotations

from collections import Counter as Count
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric, generate_latest

from router.telemetry.collectors import Distribution, Tally
from router.telemetry.inference import InferenceMetrics, InferenceValues
from router.telemetry.peer_sync import PeerSyncMetrics, PeerSyncValues
from router.telemetry.tenants import QUEUE_BUCKETS_S, TenantMetrics
from router.telemetry.totals import Totals

TTFB_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
TTFT_ERROR_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
CACHED_ERROR_BUCKETS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)
REFUSAL_REASONS = ("connections", "short", "handshake", "head", "write", "closing", "body")
"""Reasons for refused connections. Each is a series from the start, so that the first increase is seen."""
DECISION_BUCKETS_S = (2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 0.01)


@dataclass(frozen=True, slots=True)
class GaugeValues:
    """Values read when Prometheus scrapes."""

    in_flight: int
    body_bytes: int
    answer_bytes: int
    connections: int
    connections_refused: Mapping[str, int]
    """By reason."""
    lacks: Mapping[str, int]
    """By name of the error."""
    pods_known: int
    pods_admitted: int
    engine_in_flight: Mapping[str, int]
    """By pod id."""
    engine_ejected: Mapping[str, bool]
    """Whether it is ejected for failing requests, by pod id."""
    ejections: int
    model_waiting: Mapping[str, int]
    """Requests that wait, by model."""
    model_engines: Mapping[str, int]
    """Engines that take requests, by model."""
    discovery_synced: bool
    discovery_sync_age_seconds: float
    """Seconds since the set of engines was last known to be complete; before the first time, since the start."""
    discovery_errors: int
    discovery_relists: Mapping[str, int]
    """By reason."""
    registry_configured: bool
    registry_connected: bool
    registry_expired: bool
    registry_pods_synced: int
    registry_refused: int
    """Messages that were refused."""
    registry_unknown: int
    """Messages of an unknown version."""
    metrics_pauses_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds between two readings of an engine's metrics, by pod id."""
    metrics_reads: Mapping[str, int] = field(default_factory=dict)
    """By outcome."""
    limits_alone: bool = False
    beliefs: PeerSyncValues = field(default_factory=PeerSyncValues)
    """About other gateways; all zero if nothing is shared."""
    usage_log_pending_bytes: int = 0
    usage_log_lost: int = 0
    kv_event_streams: Mapping[str, int] = field(default_factory=dict)
    """By state."""
    kv_events: Mapping[str, int] = field(default_factory=dict)
    """By kind."""
    inference: InferenceValues = field(default_factory=InferenceValues)


class Metrics:
    """The gateway's metrics, in a separate registry."""

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
        self._cached_error = Distribution(
            "warmroute_gateway_cached_error_tokens",
            "Prompt tokens by which an engine reused more (or as many) or fewer than predicted when it was chosen",
            ("direction",),
            CACHED_ERROR_BUCKETS,
        )
        self._hindsight = Distribution(
            "warmroute_gateway_hindsight_seconds",
            "Seconds by which the first token would have come sooner (regret) or later (gain) on the best other "
            "engine: its predicted time, corrected by the prompt's true length, against the real time",
            ("outcome",),
            TTFT_ERROR_BUCKETS_S,
        )
        self._shadow_decisions = Tally(
            "warmroute_gateway_shadow_decisions",
            "Requests about which a shadow policy was asked, by the policy that acted, and whether the shadow policy "
            "chose the same engine, chose another, or failed",
            ("policy", "shadow", "outcome"),
        )
        self._shadow_tokens = Tally(
            "warmroute_gateway_shadow_tokens",
            "Prompt tokens of requests about which a shadow policy was asked, and those believed cached on the engine "
            "of the acting and of the shadow policy",
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
        self._queue = Distribution(
            "warmroute_gateway_queue_seconds",
            "Seconds that requests waited for an engine with room; those that did not have to are not counted",
            (),
            QUEUE_BUCKETS_S,
        )
        self._queue_refused = Tally(
            "warmroute_gateway_queue_refused",
            "Requests that were refused because they would have waited too long (late) or longer than their client "
            "allows (slo), had no place in the queue (full), lost their place to a more urgent request (shed), found "
            "no engine in time (asleep), or were waiting when the gateway stopped (stopping)",
            ("reason",),
        )
        self._unserved = Tally(
            "warmroute_gateway_unserved", "Requests for a known model that no engine served at the moment", ("model",)
        )
        self._unauthorized = Tally("warmroute_gateway_unauthorized", "Requests without a valid API key", ())
        self._unauthorized.counts[()] = 0
        self._refused = Tally(
            "warmroute_gateway_connections_refused",
            "Connections of clients that were refused (connections: too many, short: see "
            "warmroute_gateway_lacks) or cut because the client was late (handshake: for TLS, head: with a request's "
            "headers, write: to read an answer, closing: to close) or did not stop sending a refused body (body)",
            ("reason",),
        )
        self._refused.counts |= {(reason,): 0 for reason in REFUSAL_REASONS}
        self._lacks = Tally(
            "warmroute_gateway_lacks",
            "Connections that failed because this machine lacks descriptors, memory or ports, by error",
            ("error",),
        )
        self._resumed = Tally(
            "warmroute_gateway_broken_attempts",
            "Streams that an engine broke after their first byte, by what followed for the client (resumed: the rest "
            "from another engine, ended: no token was missing, failed: no other engine gave the rest; off: not "
            "enabled; request, answer, size, engine: why no other engine was asked)",
            ("then",),
        )
        for then in ("resumed", "ended", "failed", "off", "request", "answer", "size", "engine"):
            self._resumed.counts[then,] = 0
        self._hedges = Tally(
            "warmroute_gateway_hedges",
            "Requests whose first engine was silent for so long that a second one was due, by the second one's outcome "
            "(won: its answer was passed on, lost: the first engine's was, or none was; refused: it was not asked, "
            "because no other engine had room, or 2 % of requests had a second engine already)",
            ("outcome",),
        )
        self._hedges.counts |= {(outcome,): 0 for outcome in ("won", "lost", "refused")}
        self._ejections = Tally(
            "warmroute_gateway_ejections", "Times that an engine was ejected because it only failed requests", ()
        )
        self._discovery_errors = Tally("warmroute_gateway_discovery_errors", "Failed attempts to find engines", ())
        self._registry_refused = Tally(
            "warmroute_gateway_registry_refused",
            "Registry messages of engines that were refused whole: cut, or with absurd numbers",
            (),
        )
        self._registry_unknown = Tally(
            "warmroute_gateway_registry_unknown",
            "Registry messages of engines of another release that were skipped: their version is not known here",
            (),
        )
        self._relists = Tally(
            "warmroute_gateway_discovery_relists", "Complete listings of engines, by reason", ("reason",)
        )
        for collector in (
            *(self._requests, self._first_byte, self._decision, self._tokens, self._ttft_error),
            *(self._cached_error, self._hindsight),
            *(self._shadow_decisions, self._shadow_tokens, self._shadow_ttft, self._shadow_time),
            *(
                self._queue,
                self._queue_refused,
                self._refused,
                self._lacks,
                self._unserved,
                self._unauthorized,
                self._resumed,
                self._hedges,
                self._ejections,
                self._discovery_errors,
                self._relists,
                self._registry_refused,
                self._registry_unknown,
            ),
        ):
            registry.register(collector)
        self._kv_events = Tally(
            "warmroute_gateway_kv_events",
            "What engines' streams of KV events brought: batches, blocks stored and removed, caches cleared; gaps, "
            "restarts, and times that an engine's contents had to be forgotten (lost); batches or events that were "
            "refused, or not known here; blocks whose beginning is not known (orphans)",
            ("what",),
        )
        registry.register(self._kv_events)
        self._kv_event_streams = Gauge(
            "warmroute_gateway_kv_event_streams",
            "Engines whose KV events are to be followed, by state (following; waiting: for the first block of a "
            "request that this gateway sent; no_sessions: the engine is too old to tell a block's session; unheard: "
            "no connection, or missed batches are still being replayed)",
            ("state",),
            registry=registry,
        )
        self.tenants = TenantMetrics(registry)
        self._beliefs = PeerSyncMetrics(registry)
        self._usage_log_lost = Tally(
            "warmroute_gateway_usage_log_lost", "Lines of the usage log lost because it could not be written", ()
        )
        registry.register(self._usage_log_lost)
        self._engine_in_flight = Gauge(
            "warmroute_gateway_engine_in_flight",
            "Requests of this gateway in flight on an engine",
            ("engine",),
            registry=registry,
        )
        self._engine_ejected = Gauge(
            "warmroute_gateway_engine_ejected",
            "1 while an engine that answers its probes is ejected because it only failed requests",
            ("engine",),
            registry=registry,
        )
        self._metrics_pauses = Gauge(
            "warmroute_gateway_engine_metrics_pause_seconds",
            "Seconds between two readings of an engine's own metrics: more if they slow the engine down, or fail",
            ("engine",),
            registry=registry,
        )
        self._metrics_reads = Tally(
            "warmroute_gateway_engine_metrics_reads",
            "Readings of engines' own metrics (read: success, late: no answer within a second, failed: another error, "
            "protected: no key for them, none: no known metrics, odd: more than 4 MiB)",
            ("outcome",),
        )
        registry.register(self._metrics_reads)
        self._model_engines = Gauge(
            "warmroute_gateway_model_engines",
            "Engines that take requests for a known model",
            ("model",),
            registry=registry,
        )
        self._model_waiting = Gauge(
            "warmroute_gateway_queue_requests",
            "Requests for a known model that wait here because its engines are saturated, or because there are none",
            ("model",),
            registry=registry,
        )
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
        self._fallbacks = Counter(
            "warmroute_gateway_registry_fallbacks",
            "Requests routed by bounded_hash because every registry lease had run out",
            registry=registry,
        )
        self._gauges = {
            name: Gauge(f"warmroute_gateway_{name}", text, registry=registry)
            for name, text in (
                ("in_flight", "Requests in flight"),
                ("body_bytes", "Bytes of the bodies of requests in flight"),
                (
                    "answer_bytes",
                    "Bytes of answers that are kept until they are whole, or until their clients take them",
                ),
                ("connections", "Connections of clients that are open"),
                ("pods_known", "Engines that were identified, ejected ones included"),
                ("pods_admitted", "Engines that take requests"),
                ("discovery_synced", "1 once a complete set of engines was found"),
                ("discovery_sync_age_seconds", "Seconds since the set of engines was last known to be complete"),
                ("registry_configured", "1 if a Redis URL is set"),
                ("registry_connected", "1 while Redis answers"),
                ("registry_expired", "1 while every lease has run out"),
                ("registry_pods_synced", "Pods whose registry entries are current"),
                ("limits_alone", "1 while tenants' limits are kept without Redis, each gateway keeping its part"),
                ("usage_log_pending_bytes", "Bytes of the usage log that are not written yet"),
            )
        }

        self._inference = InferenceMetrics()
        registry.register(self._inference)

    def answered(self, policy: str, pod: str, status: int) -> None:
        """Count one answer to a client."""
        self._requests.counts[policy, pod, status] += 1

    def first_byte(self, policy: str, seconds: float) -> None:
        """Observe the time to the first byte of an answer."""
        self._first_byte.observe(seconds, (policy,))

    def cached(self, policy: str, *, prompt_tokens: int, cached_tokens: int, predicted_tokens: int) -> None:
        """Count a request's prompt tokens, those reused, and those predicted to be reused."""
        counts = self._tokens.counts
        counts[policy, "prompt"] += prompt_tokens
        counts[policy, "cached"] += cached_tokens
        counts[policy, "predicted"] += predicted_tokens
        error = cached_tokens - predicted_tokens
        self._cached_error.observe(abs(error), ("fewer",) if error < 0 else ("more",))

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
        """Count a request for which both policies chose; in each pair the value for `policy` comes before
        `shadow`'s."""
        outcomes, tokens = self._shadow_decisions.counts, self._shadow_tokens.counts
        outcomes[policy, shadow, "same"] += is_same
        outcomes[policy, shadow, "other"] += not is_same
        tokens[policy, shadow, "prompt"] += prompt_tokens
        for choice, cached, seconds in zip(("acting", "shadow"), cached_tokens, ttft_s, strict=True):
            tokens[policy, shadow, choice] += cached
            self._shadow_ttft.observe(seconds, (policy, shadow, choice))

    def shadow_failed(self, policy: str, shadow: str) -> None:
        """Count a request for which a shadow policy failed."""
        self._shadow_decisions.counts[policy, shadow, "failed"] += 1

    def compared_shadows(self, seconds: float) -> None:
        """Observe the time of asking all shadow policies."""
        self._shadow_time.observe(seconds)

    def predicted(self, predicted_s: float, actual_s: float) -> None:
        """Observe how far a predicted time to the first byte was off."""
        error_s = actual_s - predicted_s
        self._ttft_error.observe(abs(error_s), ("late",) if error_s > 0 else ("early",))

    def looked_back(self, regret_s: float) -> None:
        """Observe by how much the best other engine would have been faster; negative: slower."""
        self._hindsight.observe(abs(regret_s), ("regret",) if regret_s > 0 else ("gain",))

    def queued(self, seconds: float) -> None:
        """Observe how long a request waited for an engine with room, whether it got one or not."""
        self._queue.observe(seconds)

    def queue_refused(self, reason: str) -> None:
        """Count a request that was refused because the engines are saturated."""
        self._queue_refused.counts[reason,] += 1

    def unserved(self, model: str) -> None:
        """Count a request for a known model that no engine serves. A name that a client made up must not come here."""
        self._unserved.counts[model,] += 1

    def unauthorized(self) -> None:
        """Count a request without a valid key."""
        self._unauthorized.counts[()] += 1

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
        self._resumed.counts[then,] += 1

    def broke(self) -> None:
        """Count an answer that broke after its first byte."""
        self._broken.inc()

    def fell_back(self) -> None:
        """Count a request routed without the registry because it had expired."""
        self._fallbacks.inc()

    def totals(self) -> Totals:
        """Return the sums of what was counted since the start."""
        answers = errors = 0
        by_engine: Count[str] = Count()
        for (_, engine, status), count in self._requests.counts.items():
            answers += count
            errors += count if int(status) >= 500 else 0
            by_engine[str(engine)] += count
        tokens: Count[str] = Count()
        for (_, kind), count in self._tokens.counts.items():
            tokens[str(kind)] += count
        shadows: defaultdict[str, Count[str]] = defaultdict(Count)
        for tally in (self._shadow_decisions, self._shadow_tokens):
            for (_, shadow, kind), count in tally.counts.items():
                shadows[str(shadow)][str(kind)] += count
        return Totals(answers, errors, by_engine, tokens, TTFB_BUCKETS_S, self._first_byte.counted(), {**shadows})

    def keep_pods(self, pods: Iterable[str]) -> None:
        """Forget the counters of pods that are not in `pods`, so that labels stay bounded."""
        keep = {"", *pods}
        for labels in [labels for labels in self._requests.counts if labels[1] not in keep]:
            del self._requests.counts[labels]

    def render(self, values: GaugeValues) -> bytes:
        """Return the exposition text."""
        self._take(values)
        return generate_latest(self._registry)

    def families(self, values: GaugeValues) -> list[Metric]:
        """Return the same numbers for another format. They do not change afterwards."""
        self._take(values)
        return list(self._registry.collect())

    def _take(self, values: GaugeValues) -> None:
        for name, gauge in self._gauges.items():
            gauge.set(getattr(values, name))
        for family, counts in (
            (self._engine_in_flight, values.engine_in_flight),
            (self._engine_ejected, values.engine_ejected),
            (self._metrics_pauses, values.metrics_pauses_s),
            (self._model_engines, values.model_engines),
            (self._model_waiting, values.model_waiting),
            (self._kv_event_streams, values.kv_event_streams),
        ):
            family.clear()
            for label, count in counts.items():
                family.labels(label).set(count)
        self._beliefs.set(values.beliefs)
        self._inference.values = values.inference
        self._ejections.counts[()] = values.ejections
        self._kv_events.counts.update({(what,): count for what, count in values.kv_events.items()})
        self._metrics_reads.counts.update({(outcome,): count for outcome, count in values.metrics_reads.items()})
        self._registry_refused.counts[()] = values.registry_refused
        self._usage_log_lost.counts[()] = values.usage_log_lost
        self._registry_unknown.counts[()] = values.registry_unknown
        self._discovery_errors.counts[()] = values.discovery_errors
        self._refused.counts.update({(reason,): count for reason, count in values.connections_refused.items()})
        self._lacks.counts.update({(error,): count for error, count in values.lacks.items()})
        self._relists.counts.update({(reason,): count for reason, count in values.discovery_relists.items()})
