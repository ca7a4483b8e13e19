"""Prometheus metrics of one engine, with vLLM's name if vLLM has the metric, else with a `warmroute_` name.

vLLM's names and buckets: https://docs.vllm.ai/en/latest/usage/metrics.html
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from engine.common.log_writer import STDERR
from engine.contract.load import LoadReport

_LATENCY_BUCKETS_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
)
_STEP_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


@dataclass(frozen=True, slots=True)
class RegistryState:
    """State of publishing to the registry. Counters are since the start."""

    configured: bool = False
    connected: bool = False
    pending_keys: int = 0
    deltas: int = 0
    snapshots: int = 0
    dropped_keys: int = 0
    """Keys of backlogs dropped for a fresh snapshot."""
    failures: int = 0


class _Series:
    """Makes series of one registry with the label `model_name`."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self.registry = registry
        self.model_name = model_name

    def gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ("model_name",), registry=self.registry).labels(self.model_name)

    def counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ("model_name",), registry=self.registry).labels(self.model_name)

    def total(self, name: str, text: str) -> _Total:
        return _Total(self.counter(name, text))

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ("model_name",), registry=self.registry, buckets=buckets).labels(self.model_name)


class _Total:
    """A counter of what is counted elsewhere since the engine's start."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._counted = 0.0

    def advance(self, total: float) -> None:
        """Bring the counter up to the total."""
        self._counter.inc(total - self._counted)
        self._counted = total


class RequestMetrics:
    """Requests and their tokens: how many, and how long they take."""

    def __init__(self, series: _Series) -> None:
        self.running = series.gauge("vllm:num_requests_running", "Requests that hold KV blocks.")
        self.waiting = series.gauge("vllm:num_requests_waiting", "Requests that wait for a first step.")
        self.uncached_tokens = series.gauge("warmroute_uncached_tokens", "Prompt tokens still to be prefilled.")
        self.prompt_tokens = series.counter(
            "vllm:prompt_tokens", "Prompt tokens of requests whose first token was made."
        )
        self.generation_tokens = series.counter("vllm:generation_tokens", "Tokens generated.")
        self.preemptions = series.total("vllm:num_preemptions", "Requests that lost their KV blocks to others.")
        self.time_to_first_token = series.histogram(
            "vllm:time_to_first_token_seconds", "From the arrival of a request to its first token.", _LATENCY_BUCKETS_S
        )
        self.inter_token = series.histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a sequence.", _LATENCY_BUCKETS_S
        )
        self.queue = series.histogram(
            "vllm:request_queue_time_seconds", "From a request's queueing to its first step.", _LATENCY_BUCKETS_S
        )
        self.end_to_end = series.histogram(
            "vllm:e2e_request_latency_seconds", "From the arrival of a request to its last token.", _LATENCY_BUCKETS_S
        )
        self.prepare = series.histogram(
            "warmroute_prepare_seconds", "Validating, rendering and tokenizing a request.", _STEP_BUCKETS_S
        )
        labels, registry = ("model_name",), series.registry
        self.success = Counter(
            "vllm:request_success", "Sequences finished.", (*labels, "finished_reason"), registry=registry
        )
        self.constraints = Histogram(
            "warmroute_constraint_seconds",
            "Compiling what an answer must follow, by result: compiled, kept from before, or refused.",
            (*labels, "result"),
            registry=registry,
            buckets=_STEP_BUCKETS_S,
        )
        self.responses = Counter(
            "warmroute_http_responses", "HTTP responses.", (*labels, "path", "status"), registry=registry
        )
        self.ignored = Counter(
            "warmroute_ignored_fields",
            "Fields of requests that were ignored because they cannot change the answer.",
            (*labels, "field"),
            registry=registry,
        )


class CacheMetrics:
    """KV blocks of the pool, the prompts found in them, and the tokens of earlier messages."""

    def __init__(self, series: _Series) -> None:
        self.kv_usage = series.gauge(
            "vllm:kv_cache_usage_perc", "Share of KV blocks that running requests hold, 0 to 1."
        )
        self.blocks_free = series.gauge("warmroute_kv_blocks_free", "KV blocks a request could take at once.")
        self.blocks_total = series.gauge("warmroute_kv_blocks", "KV blocks in the pool.")
        self.blocks_pinned = series.gauge(
            "warmroute_kv_blocks_pinned", "KV blocks that stay because clients ask to keep prompts."
        )
        self.pins_given_up = series.total(
            "warmroute_pins_given_up", "Kept prefixes given up before their time, for lack of blocks."
        )
        self.blocks_learnt = series.gauge(
            "warmroute_kv_blocks_kept_unasked", "KV blocks kept while a tool runs or ahead of a regenerated answer."
        )
        self.learnt_given_up = series.total(
            "warmroute_kept_unasked_given_up", "Prefixes kept unasked and given up before their time."
        )
        self.queries = series.counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.hits = series.counter("vllm:prefix_cache_hits", "Prompt tokens whose KV was reused.")
        self.blocks_cached = series.gauge(
            "warmroute_kv_blocks_cached", "KV blocks of the pool that a request could reuse."
        )
        self.evictions = series.total("warmroute_kv_evictions", "Cached KV blocks that had to hold something else.")
        self.evicted_too_soon = series.total(
            "warmroute_kv_evicted_too_soon",
            "Evicted KV blocks asked for again before about four pools' worth of others was evicted.",
        )
        self.token_cache_bytes = series.gauge(
            "warmroute_token_cache_bytes", "Memory of the tokens of messages that came before."
        )
        self.token_cache_hits = series.total(
            "warmroute_token_cache_hit_characters", "Characters of prompts whose tokens were in that memory."
        )


class StepMetrics:
    """Steps on the device."""

    def __init__(self, series: _Series) -> None:
        self.elapsed = series.histogram("warmroute_step_seconds", "One step on the device.", _STEP_BUCKETS_S)
        self.prefill_tokens = series.counter("warmroute_prefill_tokens", "Tokens whose KV was computed in prefills.")
        self.failures = series.counter("warmroute_step_failures", "Steps that failed in the backend.")
        self.masks = series.total("warmroute_masks", "Masks of allowed tokens that were computed.")
        self.mask_seconds = series.total("warmroute_mask_seconds", "Processor time of computing masks.")
        self.mask_wait_seconds = series.total("warmroute_mask_wait_seconds", "Time that steps waited for masks.")


class RegistryMetrics:
    """Publishing to the registry. Each series has the name of a field of `RegistryState`."""

    def __init__(self, series: _Series) -> None:
        gauges = {
            "configured": "1 if a Redis URL is set.",
            "connected": "1 while Redis takes what is published.",
            "pending_keys": "Changed prefix keys that were not sent yet.",
        }
        totals = {
            "deltas": "Batches of changes sent to the registry.",
            "snapshots": "Snapshots of all held prefix keys sent to the registry.",
            "dropped_keys": "Changed prefix keys of backlogs that were dropped for a snapshot.",
            "failures": "Attempts to publish that Redis did not take.",
        }
        self._gauges = {name: series.gauge(f"warmroute_registry_{name}", text) for name, text in gauges.items()}
        self._totals = {name: series.total(f"warmroute_registry_{name}", text) for name, text in totals.items()}

    def update(self, state: RegistryState) -> None:
        """Set the values read at a scrape."""
        for name, gauge in self._gauges.items():
            gauge.set(getattr(state, name))
        for name, total in self._totals.items():
            total.advance(getattr(state, name))


class EngineMetrics:
    """One registry per engine; every series carries the label `model_name`."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        series = _Series(self.registry, model_name)
        self.requests = RequestMetrics(series)
        self.cache = CacheMetrics(series)
        self.steps = StepMetrics(series)
        self._publishing = RegistryMetrics(series)
        self._log_lines_dropped = series.total(
            "warmroute_log_lines_dropped", "Lines of the log that were not written, because nobody reads the log."
        )

    def observe_step(self, *, elapsed_s: float, prefill_tokens: int, sampled_tokens: int) -> None:
        """Count one step."""
        self.steps.elapsed.observe(elapsed_s)
        self.steps.prefill_tokens.inc(prefill_tokens)
        self.requests.generation_tokens.inc(sampled_tokens)

    def observe_first_token(self, *, elapsed_s: float, prompt_tokens: int, cached_tokens: int) -> None:
        """Count a sequence's prompt at its first token, `elapsed_s` seconds after the request came in."""
        self.requests.time_to_first_token.observe(elapsed_s)
        self.requests.prompt_tokens.inc(prompt_tokens)
        self.cache.queries.inc(prompt_tokens)
        self.cache.hits.inc(cached_tokens)

    def observe_finish(self, *, elapsed_s: float, reason: str) -> None:
        """Count a finished sequence, `elapsed_s` seconds after the request came in."""
        self.requests.end_to_end.observe(elapsed_s)
        self.requests.success.labels(self._model_name, reason).inc()

    def observe_constraint(self, result: str, elapsed_s: float) -> None:
        """Count a request whose answers follow a constraint, which was ready after `elapsed_s` seconds."""
        self.requests.constraints.labels(self._model_name, result).observe(elapsed_s)

    def observe_ignored(self, fields: Collection[str]) -> None:
        """Count a request's ignored fields. They are names of the API, not ones that a client made up."""
        for name in fields:
            self.requests.ignored.labels(self._model_name, name).inc()

    def observe_response(self, path: str, status: int) -> None:
        """Count an HTTP response. `path` is a route, never a path that a client made up."""
        self.requests.responses.labels(self._model_name, path, str(status)).inc()

    def update(
        self,
        load: LoadReport,
        *,
        preemptions: int,
        cached_blocks: int = 0,
        evicted_blocks: int = 0,
        evicted_too_soon: int = 0,
    ) -> None:
        """Set the values read at a scrape. Counts except `load` and `cached_blocks` are since the engine's start."""
        self.requests.running.set(load.running)
        self.requests.waiting.set(load.waiting)
        self.requests.uncached_tokens.set(load.uncached_tokens)
        self.cache.blocks_free.set(load.blocks_free)
        self.cache.blocks_total.set(load.blocks_total)
        self.cache.kv_usage.set(1 - load.blocks_free / load.blocks_total if load.blocks_total else 0)
        self.cache.blocks_cached.set(cached_blocks)
        self.requests.preemptions.advance(preemptions)
        self.cache.evictions.advance(evicted_blocks)
        self.cache.evicted_too_soon.advance(evicted_too_soon)
        self._log_lines_dropped.advance(STDERR.dropped)

    def update_pins(self, blocks: int, given_up: int, learnt_blocks: int, learnt_given_up: int) -> None:
        """Set the pins' values read at a scrape. `given_up` and `learnt_given_up`: since the engine's start."""
        self.cache.blocks_pinned.set(blocks)
        self.cache.blocks_learnt.set(learnt_blocks)
        self.cache.pins_given_up.advance(given_up)
        self.cache.learnt_given_up.advance(learnt_given_up)

    def update_tokenizing(self, cached_bytes: int, hit_chars: int) -> None:
        """Set the token cache's values read at a scrape. `hit_chars`: since the engine's start."""
        self.cache.token_cache_bytes.set(cached_bytes)
        self.cache.token_cache_hits.advance(hit_chars)

    def update_masks(self, masks: int, computing_s: float, waited_s: float) -> None:
        """Set the masks' values read at a scrape, since the engine's start."""
        self.steps.masks.advance(masks)
        self.steps.mask_seconds.advance(computing_s)
        self.steps.mask_wait_seconds.advance(waited_s)

    def update_registry(self, state: RegistryState) -> None:
        """Set the registry's values read at a scrape."""
        self._publishing.update(state)

    def families(self) -> list[Metric]:
        """Return a copy of all series as they are now."""
        return list(self.registry.collect())

    def exposition(self) -> bytes:
        """Return all series in Prometheus' text format."""
        return generate_latest(self.registry)
