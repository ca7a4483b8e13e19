"""Metrics of the answers that clients get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from prometheus_client import CollectorRegistry

from router.telemetry.collectors import Distribution, Tally, register

TTFB_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)


class AnswerMetrics:
    """Answers by status and engine, and how soon they begin."""

    def __init__(self, registry: CollectorRegistry) -> None:
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
        self._unserved = Tally(
            "warmroute_gateway_unserved", "Requests for a known model that no engine served at the moment", ("model",)
        )
        self._unauthorized = Tally("warmroute_gateway_unauthorized", "Requests without a valid API key", ())
        self._unauthorized.counts[()] = 0
        self._unknown_paths = Tally(
            "warmroute_gateway_unknown_paths",
            "Requests with a method and a path that clients may not use, by port (http, picker)",
            ("port",),
        )
        self._unknown_paths.counts |= {("http",): 0, ("picker",): 0}
        self._fields = Tally(
            "warmroute_gateway_fields_kept_back",
            "Fields of requests that engines must not get, by name and outcome (dropped: the request was served "
            "without it; refused: it was answered with 400)",
            ("field", "outcome"),
        )
        tallies = (self._requests, self._first_byte, self._unserved, self._unauthorized, self._unknown_paths)
        register(registry, *tallies, self._fields)

    def answered(self, policy: str, pod: str, status: int) -> None:
        """Count one answer to a client."""
        self._requests.counts[policy, pod, status] += 1

    def first_byte(self, policy: str, seconds: float) -> None:
        """Observe the time to the first byte of an answer."""
        self._first_byte.observe(seconds, (policy,))

    def unserved(self, model: str) -> None:
        """Count a request for a known model that no engine serves. A name that a client made up must not come here."""
        self._unserved.counts[model,] += 1

    def unauthorized(self) -> None:
        """Count a request without a valid key."""
        self._unauthorized.counts[()] += 1

    def unknown_path(self, port: Literal["http", "picker"]) -> None:
        """Count a request for what no client may use."""
        self._unknown_paths.counts[port,] += 1

    def field_kept_back(self, field: str, outcome: Literal["dropped", "refused"]) -> bool:
        """Count a field that no engine gets. A name that a client made up must not come here. Return whether this is
        the first one."""
        self._fields.counts[field, outcome] += 1
        return self._fields.counts[field, outcome] == 1

    def keep_pods(self, pods: Iterable[str]) -> None:
        """Forget the counters of pods that are not in `pods`, so that labels stay bounded."""
        keep = {"", *pods}
        for labels in [labels for labels in self._requests.counts if labels[1] not in keep]:
            del self._requests.counts[labels]

    def totals(self) -> tuple[int, int, Counter[str]]:
        """Return the answers since the start, those of them with status 500 or above, and the answers by pod id."""
        answers = errors = 0
        by_engine: Counter[str] = Counter()
        for (_, engine, status), count in self._requests.counts.items():
            answers += count
            errors += count if int(status) >= 500 else 0
            by_engine[str(engine)] += count
        return answers, errors, by_engine

    def first_bytes(self) -> Sequence[int]:
        """Return the answers in each bucket of the time to their first byte; the last bucket has no upper bound."""
        return self._first_byte.counted()
