"""The gateway's own counters have the same values as the library's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from router.telemetry.answers import TTFB_BUCKETS_S
from router.telemetry.collectors import Distribution, Tally

LABELS = st.sampled_from(["round_robin", "predicted_ttft", 'odd "name"\n'])


def exposed(registry: CollectorRegistry) -> list[str]:
    """Return the lines of a scrape, except the times of creation."""
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@given(st.lists(st.tuples(LABELS, st.one_of(st.floats(0, 200), st.sampled_from(TTFB_BUCKETS_S)))))
def test_a_distribution_is_a_histogram(values: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    distribution = Distribution("seconds", "Text", ("policy",), TTFB_BUCKETS_S)
    ours.register(distribution)
    histogram = Histogram("seconds", "Text", ("policy",), buckets=TTFB_BUCKETS_S, registry=theirs)
    for label, value in values:
        distribution.observe(value, (label,))
        histogram.labels(label).observe(value)
    assert exposed(ours) == exposed(theirs)


@given(st.lists(st.tuples(LABELS, st.integers(0, 600), st.integers(0, 10**6))))
def test_a_tally_is_a_counter(counts: list[tuple[str, int, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = Tally("requests", "Text", ("policy", "status"))
    ours.register(tally)
    counter = Counter("requests", "Text", ("policy", "status"), registry=theirs)
    for label, status, count in counts:
        tally.counts[label, status] += count
        counter.labels(label, str(status)).inc(count)
    assert exposed(ours) == exposed(theirs)
