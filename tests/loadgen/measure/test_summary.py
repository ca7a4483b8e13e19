"""The numbers of a run, compared with plain Python over the same requests."""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.measure.pods import Counted, PodCount
from loadgen.measure.records import RequestRecord
from loadgen.measure.summary import summarise, summarise_runs
from loadgen.measure.validity import MAX_LAG_SHARE
from loadgen.result.model import Reuse
from tests.loadgen.measure.builders import MadeRun, failed, made_run, records_of, request

times_s = st.floats(0, 20)
spans_s = st.floats(0.001, 5)


def first_s(record: RequestRecord) -> float:
    assert record.first_token_s is not None
    return record.first_token_s


@st.composite
def requests(draw: st.DrawFn, completed: bool | None = None) -> RequestRecord | None:
    intended_s, late_s, ttft_s, rest_s = draw(times_s), draw(st.floats(0, 1)), draw(spans_s), draw(spans_s)
    session = draw(st.integers(0, 1000))
    pod = draw(st.sampled_from(["a", "b", "c"]))
    sent_s = intended_s + late_s
    if not (draw(st.booleans()) if completed is None else completed):
        return failed(session, intended_s=intended_s, sent_s=sent_s, finished_s=sent_s + rest_s, pod=pod)
    return request(
        session,
        intended_s=intended_s,
        sent_s=sent_s,
        first_token_s=sent_s + ttft_s,
        finished_s=sent_s + ttft_s + rest_s,
        output_tokens=draw(st.integers(0, 50)),
        prompt_tokens=draw(st.integers(1, 500)),
        cached_tokens=0,
        pod=pod,
    )


@settings(max_examples=60, deadline=None)
@given(sent=st.lists(requests(), min_size=1, max_size=30), unsent=st.integers(0, 3))
def test_every_number_is_what_plain_python_finds(sent: list[RequestRecord], unsent: int) -> None:
    run = made_run(sent, len(sent) + unsent)
    found = summarise(run, ["a", "b", "c", "idle"])
    done = [r for r in sent if r.failure is None]
    assert (found.planned, found.completed, found.failed) == (len(sent) + unsent, len(done), len(sent) - len(done))
    assert found.not_sent == unsent
    assert found.failures == ({"http 503": len(sent) - len(done)} if len(done) < len(sent) else {})
    assert found.duration_s == pytest.approx(max(r.finished_s for r in sent))
    assert found.lag.mean_ms == pytest.approx(1000 * statistics.fmean(r.sent_s - r.intended_s for r in sent), abs=1e-6)
    if done:
        ttfts = [(first_s(r) - r.intended_s) * 1000 for r in done]
        assert found.ttft.mean_ms == pytest.approx(statistics.fmean(ttfts))
        assert found.ttft.median_ms == pytest.approx(statistics.median(ttfts))
        sent_ttfts = [(first_s(r) - r.sent_s) * 1000 for r in done]
        assert found.ttft_from_send.mean_ms == pytest.approx(statistics.fmean(sent_ttfts))
        assert found.e2e.mean_ms == pytest.approx(
            statistics.fmean([(r.finished_s - r.intended_s) * 1000 for r in done])
        )
    several = [r for r in done if r.output_tokens > 1]
    if several:
        tpots = [(r.finished_s - first_s(r)) * 1000 / (r.output_tokens - 1) for r in several]
        assert found.tpot.mean_ms == pytest.approx(statistics.fmean(tpots))
    else:
        assert found.tpot.mean_ms is None
    for pod in ("a", "b", "c", "idle"):
        mine = [r for r in sent if r.pod == pod]
        assert found.pods[pod].requests == len(mine)
        assert found.pods[pod].max_in_flight == max(
            (sum(o.sent_s <= r.sent_s < o.finished_s for o in mine) for r in mine), default=0
        )
        busy_s = sum(r.finished_s - r.sent_s for r in mine)
        assert found.pods[pod].mean_in_flight == pytest.approx(busy_s / found.duration_s)
    loads = [pod.mean_in_flight for pod in found.pods.values()]
    assert found.imbalance == pytest.approx(max(loads) * 4 / sum(loads))
    assert found.jain_index == pytest.approx(sum(loads) ** 2 / (4 * sum(x * x for x in loads)))
    assert found.max_concurrent_requests == max(
        sum(int(r.sent_s) <= second <= int(r.finished_s) for r in sent) for second in range(int(found.duration_s) + 1)
    )


@settings(max_examples=40, deadline=None)
@given(sent=st.lists(requests(), min_size=1, max_size=30))
def test_the_series_holds_what_happened(sent: list[RequestRecord]) -> None:
    found = summarise(made_run(sent), ["a", "b", "c"])
    series = found.series
    assert series is not None
    buckets = len(series.request_rate)
    widths = [min(series.bucket_s, found.duration_s - i * series.bucket_s) for i in range(buckets)]
    assert sum(rate * width for rate, width in zip(series.request_rate, widths, strict=True)) == pytest.approx(
        len(sent)
    )
    for pod, loads in series.in_flight.items():
        busy_s = sum(r.finished_s - r.sent_s for r in sent if r.pod == pod)
        assert sum(load * width for load, width in zip(loads, widths, strict=True)) == pytest.approx(busy_s, abs=1e-6)


def test_a_failure_counts_as_infinitely_slow_in_the_figures_that_say_so() -> None:
    fast = [request(i, ttft_s=0.1 + i / 1000) for i in range(198)]
    few = summarise(made_run([*fast, failed(198)]))
    assert few.ttft.with_failures_p99_ms is not None
    assert few.ttft.p99_ms is not None
    assert few.ttft.with_failures_p99_ms > few.ttft.p99_ms
    many = summarise(made_run([*fast, *(failed(200 + i) for i in range(5))]))
    assert many.ttft.with_failures_p99_ms is None
    assert many.ttft.p99_ms == few.ttft.p99_ms
    assert many.failure_details == {"http 503": "http 503, says the server"}


@given(failures=st.integers(0, 6), requests=st.integers(7, 600))
def test_p99_with_failures_is_infinite_from_one_percent_on(failures: int, requests: int) -> None:
    sent = [*(failed(i) for i in range(failures)), *(request(10 + i) for i in range(requests - failures))]
    found = summarise(made_run(sent), in_brief=True).ttft.with_failures_p99_ms
    assert (found is None) == (failures * 100 >= requests)


def test_a_late_generator_makes_a_run_invalid() -> None:
    """Sending was late by 3 % of every TTFT, so reading may have been late too."""
    late = summarise(made_run([request(i, sent_s=0.003, ttft_s=0.1) for i in range(10)]))
    assert late.ttft.mean_ms == pytest.approx(100)
    assert late.ttft_from_send.mean_ms == pytest.approx(97)
    assert late.e2e.mean_ms == pytest.approx(600)
    assert late.e2e_from_send.mean_ms == pytest.approx(597)
    assert late.validity.lag_share == pytest.approx(0.06)
    assert late.validity.is_late
    assert not late.validity.valid
    assert "load generator was late by 3.0 ms on average" in late.validity.reasons[0]
    queued = summarise(made_run([request(i, sent_s=0.006, ttft_s=0.1, queued_s=0.004) for i in range(10)]))
    assert queued.validity.valid, "waiting because of a requested cap is not lag"
    assert queued.ttft.mean_ms == pytest.approx(100), "but the user waits"


@given(
    lags_ms=st.lists(st.integers(0, 400), min_size=1, max_size=40),
    from_send_ms=st.lists(st.integers(1, 400), min_size=40, max_size=40),
)
@settings(deadline=None)
def test_each_figure_is_judged_by_what_lag_made_of_it(lags_ms: list[int], from_send_ms: list[int]) -> None:
    rows = list(zip(lags_ms, from_send_ms, strict=False))
    found = summarise(
        made_run([request(i, sent_s=late / 1e3, ttft_s=(late + t) / 1e3) for i, (late, t) in enumerate(rows)])
    )
    ttft, sent = found.ttft, found.ttft_from_send
    figures = {
        "mean": (ttft.mean_ms, sent.mean_ms),
        "median": (ttft.median_ms, sent.median_ms),
        "p90": (ttft.p90_ms, sent.p90_ms),
        "p99": (ttft.p99_ms, sent.p99_ms),
    }
    shares = {}
    for name, (with_lag, without) in figures.items():
        assert with_lag
        assert without
        shares[name] = 2 * (with_lag - without) / with_lag
    assert found.validity.lag_share == pytest.approx(max(shares.values()), abs=1e-9)
    assert shares[found.validity.lag_share_of] == pytest.approx(max(shares.values()), abs=1e-9)
    assert found.validity.lag_share is not None
    assert found.validity.valid == (found.validity.lag_share <= MAX_LAG_SHARE)


def test_a_few_late_requests_spoil_no_figure_but_their_own() -> None:
    """One request of a thousand was sent 50 ms late: no figure shows it, so no figure is called affected."""
    rows = [request(i, sent_s=0.05 if i == 500 else 0.0, ttft_s=0.05 + i / 1e4) for i in range(1000)]
    assert summarise(made_run(rows)).validity.valid


def test_a_run_without_answers_is_invalid() -> None:
    assert summarise(made_run([failed()])).validity.reasons == ("no request completed",)
    mostly = summarise(made_run([request(0), failed(1), failed(2)]))
    assert mostly.validity.reasons == ("2 of 3 requests failed: the rest is not a sample of the workload",)
    empty = summarise(made_run([], planned=4))
    assert (empty.planned, empty.not_sent, empty.validity.valid, empty.series) == (4, 4, False, None)
    assert empty.reuse.cached_token_rate is None


def test_usage_and_counters_must_agree() -> None:
    run = made_run([request(i, prompt_tokens=100, cached_tokens=40) for i in range(10)])

    def reuse(prompt: int, cached: int) -> Reuse:
        return summarise(run, ["pod-0"], counted=Counted({"pod-0": PodCount(prompt, cached)})).reuse

    assert reuse(1000, 405).counters_agree is True
    assert reuse(1000, 405).counted_rate == 0.405
    assert reuse(1000, 415).counters_agree is False
    assert summarise(run).reuse.counters_agree is None
    partial = summarise(run, counted=Counted({"pod-0": PodCount(1000, 900)}, ("pod-1: HTTP 500",)))
    assert partial.reuse.counted_rate is None, "a sum over some of the pods is not a hit rate"


def test_without_usage_no_hit_rate_is_claimed() -> None:
    silent = summarise(made_run([request(prompt_tokens=0, cached_tokens=0, has_usage=False)]))
    assert silent.reuse.cached_token_rate is None


@settings(max_examples=30, deadline=None)
@given(blocks=st.lists(st.lists(requests(), min_size=1, max_size=8), min_size=1, max_size=4))
def test_pooled_runs_add_up(blocks: list[list[RequestRecord]]) -> None:
    runs = [made_run(block) for block in blocks]
    pooled, single = summarise_runs(runs, ["a", "b", "c"]), [summarise(run, ["a", "b", "c"]) for run in runs]
    for name in ("planned", "completed", "failed", "prompt_tokens", "output_tokens"):
        assert getattr(pooled, name) == sum(getattr(one, name) for one in single)
    assert pooled.duration_s == pytest.approx(sum(one.duration_s for one in single))
    everything = [(first_s(r) - r.intended_s) * 1000 for block in blocks for r in block if r.failure is None]
    if everything:
        assert pooled.ttft.p90_ms == pytest.approx(np.percentile(everything, 90))
    for pod in ("a", "b", "c"):
        assert pooled.pods[pod].requests == sum(one.pods[pod].requests for one in single)
        assert pooled.pods[pod].max_in_flight == max(one.pods[pod].max_in_flight for one in single)


def test_most_tokens_in_a_second() -> None:
    # `steady` has one token at 0.5 s, then nine at 4.5 tokens/s until 2.5 s. `at_once` has five tokens at 1.2 s.
    steady = request(output_tokens=10, first_token_s=0.5, finished_s=2.5)
    at_once = request(output_tokens=5, first_token_s=1.2, finished_s=1.2)
    assert summarise(made_run([steady])).max_output_tokens_per_s == pytest.approx(4.5)
    assert summarise(made_run([steady, at_once])).max_output_tokens_per_s == pytest.approx(9.5)


def test_gaps_of_completed_requests_are_pooled() -> None:
    """A request that was cut off or timed out is in no mean; the wait that ended it would be its longest gap."""
    run = made_run([request(gaps_s=(0.01,) * 9), request(gaps_s=(0.03,)), failed(gaps_s=(5.0,), why="timeout")])
    found = summarise(run).itl
    assert found.mean_ms == pytest.approx(12)
    assert found.median_ms == pytest.approx(10, rel=0.01)
    assert found.p99_ms == pytest.approx(30, rel=0.01)


def test_percentiles_asked_for_and_plots_left_out() -> None:
    run = made_run([request(i, ttft_s=i / 100) for i in range(1, 101)])
    assert summarise(run, percentiles=(99.9,)).ttft.percentiles_ms == {"99.9": pytest.approx(999.01)}
    asked = summarise(run, percentiles=(50.0, 99.99999, 99.999999)).ttft.percentiles_ms
    assert list(asked) == ["50", "99.99999", "99.999999"]
    brief = summarise(run, in_brief=True)
    assert (brief.ttft.cdf_ms, brief.series) == ((), None)
    assert len(summarise(run).ttft.cdf_ms) == 101


def test_a_hundred_thousand_requests_take_moments() -> None:
    """All computation is vectorised: in pure Python it would exceed the generous limit on any machine."""
    sample = records_of([request(i, intended_s=i / 100, pod=f"pod-{i % 8}", prompt_hash=i + 1) for i in range(1000)])
    from loadgen.measure.records import Records

    run = MadeRun(Records.merge([sample] * 100), 100_000, 20.0)
    began_s = time.process_time()
    found = summarise(run)
    assert found.completed == 100_000
    assert found.reuse.duplicate_prompts == 99_000
    assert time.process_time() - began_s < 20
