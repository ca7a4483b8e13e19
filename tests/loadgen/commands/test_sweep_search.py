"""The next step of a sweep, and which steps are saturated."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.measure.records import Records, RequestRecord
from loadgen.measure.summary import summarise
from loadgen.result.model import Summary, SweepPoint
from loadgen.sweep.saturation import achieved_share, good_share, reason
from loadgen.sweep.search import MAX_HALVINGS, Search
from tests.loadgen.measure.builders import failed, made_run, records_of, request


def searched(search: Search, knee: float) -> Search:
    for _ in range(200):
        if (step := search.next()) is None:
            return search
        search.add(step, saturated=step > knee)
    raise AssertionError("the search does not end")


@given(st.floats(0.02, 5000), st.floats(0.1, 100), st.floats(0.02, 0.5))
def test_a_knee_between_two_steps_is_found_as_closely_as_asked(knee: float, start: float, precision: float) -> None:
    search = searched(Search(start, precision), knee)
    if knee < start / 2**MAX_HALVINGS:
        assert search.good is None
        return
    assert search.good is not None
    assert search.bad is not None
    assert search.good <= knee < search.bad
    # Steps are rounded to four digits, which limits how narrow a gap can become.
    assert search.bad <= search.good * (1 + precision) * 1.001
    assert len(search.tried) < 4 + math.log2(max(knee / start, start / knee, 2)) + math.log2(
        1 / math.log2(1 + precision) + 1
    )


@given(st.integers(0, 3000), st.integers(1, 200))
def test_whole_steps_stay_whole(knee: int, start: int) -> None:
    search = searched(Search(float(start), 0.1, is_whole=True), knee)
    assert all(step == int(step) >= 1 for step in search.tried)
    if search.good is not None:
        assert search.bad is not None
        assert search.good <= knee < search.bad
        assert search.bad - search.good <= 1 or search.bad <= search.good * 1.1


def test_listed_steps_end_with_the_first_saturated() -> None:
    search = searched(Search(1, steps=(1, 2, 4, 8)), 3)
    assert search.tried == {1: False, 2: False, 4: True}
    assert (search.good, search.bad) == (2, 4)


def test_no_step_is_above_the_most() -> None:
    search = searched(Search(3, most=10), math.inf)
    assert list(search.tried) == [3, 6, 10]
    assert search.bad is None


def queue(rate: float, service_s: float, count: int = 200, seed: int = 1) -> Records:
    """Return records of a server that takes one request after the other, with Poisson arrivals."""
    rng = np.random.default_rng(seed)
    due, free_s, out = np.cumsum(rng.exponential(1 / rate, count)), 0.0, []
    for number, at in enumerate(due.tolist()):
        free_s = max(free_s, at) + service_s
        out.append(RequestRecord(number, 0, "", at, at, free_s, first_token_s=free_s, prompt_tokens=1, output_tokens=1))
    return records_of(out)


@given(st.integers(0, 50))
def test_a_server_below_its_capacity_achieves_what_is_offered(seed: int) -> None:
    assert achieved_share(queue(5.0, 0.1, seed=seed)) > 0.95


@given(st.floats(1.3, 4.0), st.integers(0, 20))
def test_above_it_the_share_is_that_of_capacity_to_offer(load: float, seed: int) -> None:
    assert achieved_share(queue(10 * load, 0.1, seed=seed)) == pytest.approx(1 / load, rel=0.25)


def test_few_requests_tell_nothing() -> None:
    assert achieved_share(queue(100.0, 0.1, count=10)) == 1


def summary(ttft_s: float = 0.1, throughput: float = 10.0, failures: int = 0) -> Summary:
    requests = [request(i, ttft_s=ttft_s, intended_s=i / 100) for i in range(40 - failures)]
    requests += [failed(40 + i) for i in range(failures)]
    made = summarise(made_run(requests), (), {"ttft": 5000.0})
    return made.model_copy(update={"request_throughput": throughput})


def point(step: int, **fields: Any) -> SweepPoint:
    return SweepPoint(arm="a", rate=None, concurrency=step, summary=summary(**fields), saturated=False)


STEADY = queue(5.0, 0.01)


def test_failures_and_missed_objectives_saturate() -> None:
    assert good_share(summary(failures=4)) == 0.9
    assert reason(summary(failures=4), STEADY, [], 0) == ""
    assert "88% of the offered requests were good" in reason(summary(failures=5), STEADY, [], 0)
    assert "0% of the offered" in reason(summary(ttft_s=6.0), STEADY, [], 0)


def test_a_server_that_falls_behind_is_saturated() -> None:
    assert "requests ended at" in reason(summary(), queue(20.0, 0.1), [], 0)
    assert reason(summary(), queue(20.0, 0.1), [], 4) == "", "a closed loop offers no rate"


def test_more_at_a_time_must_bring_throughput() -> None:
    lower = [point(2, throughput=10.0)]
    assert reason(summary(throughput=11.1), STEADY, lower, 4) == ""
    assert "4 at a time brought +9% throughput over 2" in reason(summary(throughput=10.9), STEADY, lower, 4)


def test_an_exploding_ttft_is_a_queue() -> None:
    lower = [point(1, ttft_s=0.1)]
    assert reason(summary(ttft_s=0.9), STEADY, lower, 0) == ""
    assert "p99 of TTFT is 11 times" in reason(summary(ttft_s=1.1), STEADY, lower, 0)
