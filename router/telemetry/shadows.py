"""Metrics of shadow policies: what they would have decided."""

from __future__ import annotations

from collections import Counter, defaultdict

from prometheus_client import CollectorRegistry

from router.telemetry.answers import TTFB_BUCKETS_S
from router.telemetry.collectors import Distribution, Tally, register
from router.telemetry.decisions import DECISION_BUCKETS_S


class ShadowMetrics:
    """Requests about which shadow policies were asked."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._decisions = Tally(
            "warmroute_gateway_shadow_decisions",
            "Requests about which a shadow policy was asked, by the policy that acted, and whether the shadow policy "
            "chose the same engine, chose another, or failed",
            ("policy", "shadow", "outcome"),
        )
        self._tokens = Tally(
            "warmroute_gateway_shadow_tokens",
            "Prompt tokens of requests about which a shadow policy was asked, and those believed cached on the engine "
            "of the acting and of the shadow policy",
            ("policy", "shadow", "kind"),
        )
        self._ttft = Distribution(
            "warmroute_gateway_shadow_ttft_seconds",
            "Seconds to the first token predicted for the engine of the acting and of the shadow policy",
            ("policy", "shadow", "choice"),
            TTFB_BUCKETS_S,
        )
        self._time = Distribution(
            "warmroute_gateway_shadow_seconds",
            "Seconds to ask all shadow policies about one request, after its decision",
            (),
            DECISION_BUCKETS_S,
        )
        register(registry, self._decisions, self._tokens, self._ttft, self._time)

    def chose(
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
        outcomes, tokens = self._decisions.counts, self._tokens.counts
        outcomes[policy, shadow, "same"] += is_same
        outcomes[policy, shadow, "other"] += not is_same
        tokens[policy, shadow, "prompt"] += prompt_tokens
        for choice, cached, seconds in zip(("acting", "shadow"), cached_tokens, ttft_s, strict=True):
            tokens[policy, shadow, choice] += cached
            self._ttft.observe(seconds, (policy, shadow, choice))

    def failed(self, policy: str, shadow: str) -> None:
        """Count a request for which a shadow policy failed."""
        self._decisions.counts[policy, shadow, "failed"] += 1

    def took(self, seconds: float) -> None:
        """Observe the time of asking all shadow policies."""
        self._time.observe(seconds)

    def totals(self) -> dict[str, Counter[str]]:
        """Return decisions and tokens since the start, by shadow policy (see `Totals.shadows`)."""
        shadows: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for tally in (self._decisions, self._tokens):
            for (_, shadow, kind), count in tally.counts.items():
                shadows[str(shadow)][str(kind)] += count
        return {**shadows}
