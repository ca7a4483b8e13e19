"""Metrics of decisions: what they took, and how right their predictions were."""

from __future__ import annotations

from collections import Counter as Count

from prometheus_client import CollectorRegistry, Counter

from router.telemetry.collectors import Distribution, Tally, register

DECISION_BUCKETS_S = (2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 0.01)
TTFT_ERROR_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
CACHED_ERROR_BUCKETS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)


class DecisionMetrics:
    """Decisions, and their predictions beside what happened."""

    def __init__(self, registry: CollectorRegistry) -> None:
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
        register(registry, self._decision, self._tokens, self._ttft_error, self._cached_error, self._hindsight)
        self._fallbacks = Counter(
            "warmroute_gateway_registry_fallbacks",
            "Requests routed by bounded_hash because every registry lease had run out",
            registry=registry,
        )

    def decided(self, seconds: float) -> None:
        """Observe the time of one decision."""
        self._decision.observe(seconds)

    def fell_back(self) -> None:
        """Count a request routed without the registry because it had expired."""
        self._fallbacks.inc()

    def cached(self, policy: str, *, prompt_tokens: int, cached_tokens: int, predicted_tokens: int) -> None:
        """Count a request's prompt tokens, those reused, and those predicted to be reused."""
        counts = self._tokens.counts
        counts[policy, "prompt"] += prompt_tokens
        counts[policy, "cached"] += cached_tokens
        counts[policy, "predicted"] += predicted_tokens
        error = cached_tokens - predicted_tokens
        self._cached_error.observe(abs(error), ("fewer",) if error < 0 else ("more",))

    def predicted(self, predicted_s: float, actual_s: float) -> None:
        """Observe how far a predicted time to the first byte was off."""
        error_s = actual_s - predicted_s
        self._ttft_error.observe(abs(error_s), ("late",) if error_s > 0 else ("early",))

    def looked_back(self, regret_s: float) -> None:
        """Observe by how much the best other engine would have been faster; negative: slower."""
        self._hindsight.observe(abs(regret_s), ("regret",) if regret_s > 0 else ("gain",))

    def tokens(self) -> Count[str]:
        """Return the tokens of prompts since the start: `prompt`, `cached` and `predicted`."""
        tokens: Count[str] = Count()
        for (_, kind), count in self._tokens.counts.items():
            tokens[str(kind)] += count
        return tokens
