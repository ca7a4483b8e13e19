"""Summaries against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.client import RequestRecord
from loadgen.metrics import Distribution, distribution, imbalance, summarise
from loadgen.runner import ArmRun

TIMES = st.floats(0, 1000)


def percentile(values: list[float], percent: float) -> float:
    """Linear interpolation between order statistics, written out."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@given(st.lists(TIMES, min_size=1))
def test_distribution_in_milliseconds(values: list[float]):
    found = distribution(values)
    assert found.mean_ms == pytest.approx(1000 * sum(values) / len(values))
    for percent, got in ((50, found.median_ms), (90, found.p90_ms), (99, found.p99_ms)):
        assert got == pytest.approx(1000 * percentile(values, percent))
        assert got == pytest.approx(1000 * float(np.percentile(values, percent)))


def test_nothing_measured():
    assert distribution([]) == Distribution(0.0, 0.0, 0.0, 0.0)
    empty = summarise(ArmRun((), 3, 5.0), ["a", "b"])
    assert (empty.completed, empty.failed, empty.not_sent, empty.duration_s, empty.imbalance) == (0, 0, 3, 0.0, 1.0)
    assert empty.cached_token_rate == 0.0


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=20), st.floats(0.1, 10))
def test_imbalance_lies_between_one_and_the_pods_and_ignores_scale(loads: list[float], scale: float):
    value = imbalance(loads)
    assert value == pytest.approx(min(max(value, 1), len(loads)))
    assert imbalance([load * scale for load in loads]) == pytest.approx(value)
    assert imbalance([1.0] * len(loads)) == 1
    assert imbalance([loads[0]] + [0.0] * 3) == pytest.approx(4)


RECORDS = st.lists(
    st.builds(
        RequestRecord,
        session=st.integers(0, 5),
        turn=st.integers(0, 3),
        tenant=st.none(),
        intended_s=st.floats(100, 110),
        sent_s=st.floats(110, 111),
        first_token_s=st.floats(111, 120),
        finished_s=st.floats(120, 130),
        prompt_tokens=st.integers(1, 1000),
        cached_tokens=st.integers(0, 1),
        output_tokens=st.integers(0, 40),
        pod=st.sampled_from(["a", "b", ""]),
        failure=st.sampled_from([None, None, "timeout", "http 503"]),
    )
)


@given(RECORDS, st.integers(0, 5))
def test_every_request_is_accounted_for(records: list[RequestRecord], unsent: int):
    m = summarise(ArmRun(tuple(records), len(records) + unsent, 100.0), ["a", "b", "idle"])
    done = [record for record in records if record.failure is None]
    assert m.completed + m.failed + m.not_sent == m.planned
    assert sum(m.failures.values()) == m.failed
    assert m.completed == len(done)
    assert m.prompt_tokens == sum(record.prompt_tokens for record in done)
    assert 0 <= m.cached_token_rate <= 1
    assert m.request_throughput * m.duration_s == pytest.approx(len(done))
    assert m.pods["idle"].requests == 0
    assert sum(load.requests for load in m.pods.values()) == sum(bool(record.pod) for record in records)
    for pod, load in m.pods.items():
        busy_s = sum(record.finished_s - record.sent_s for record in records if record.pod == pod)
        assert load.mean_in_flight * m.duration_s == pytest.approx(busy_s)


def test_each_time_by_its_definition(make_record):
    record = make_record(intended_s=10.0, sent_s=10.2, first_token_s=10.5, finished_s=12.5, output_tokens=5)
    one_token = make_record(intended_s=10.0, sent_s=10.2, first_token_s=10.5, finished_s=12.5, output_tokens=1)
    m = summarise(ArmRun((record, one_token), 2, 9.0), ["pod-0"])
    assert m.ttft.mean_ms == pytest.approx(500)
    assert m.e2e.mean_ms == pytest.approx(2500)
    assert m.lag.mean_ms == pytest.approx(200)
    assert m.tpot.mean_ms == pytest.approx(500)  # of the longer answer alone
    assert m.duration_s == pytest.approx(3.5)


def test_a_failure_counts_as_failed_and_in_no_latency(make_record):
    slow = make_record(session=1, ttft_s=9.0, failure="timeout", cached_tokens=100)
    m = summarise(ArmRun((make_record(), slow), 2, 0.0), ["pod-0"])
    assert (m.completed, m.failed, dict(m.failures)) == (1, 1, {"timeout": 1})
    assert m.ttft.p99_ms == pytest.approx(100)
    assert m.cached_token_rate == pytest.approx(0.4)
