"""Service-level objectives count all offered requests."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.measure.goodput import parse_objectives
from loadgen.measure.summary import summarise
from tests.loadgen.measure.builders import failed, made_run, request


@settings(max_examples=50, deadline=None)
@given(
    ttfts_ms=st.lists(st.integers(1, 1000), max_size=30),
    broken=st.integers(0, 5),
    unsent=st.integers(0, 5),
    limit_ms=st.integers(1, 1000),
)
def test_failed_and_unsent_requests_are_not_good(ttfts_ms: list[int], broken: int, unsent: int, limit_ms: int) -> None:
    sent = [request(i, ttft_s=ms / 1000) for i, ms in enumerate(ttfts_ms)] + [failed(100 + i) for i in range(broken)]
    found = summarise(made_run(sent, len(sent) + unsent, duration_s=10.0), objectives_ms={"ttft": limit_ms}).goodput
    assert found is not None
    good = sum(ms <= limit_ms for ms in ttfts_ms)
    offered = len(sent) + unsent
    assert found.share == (pytest.approx(good / offered) if offered else 0)
    assert found.request_goodput == pytest.approx(good / 10.0)


@pytest.mark.parametrize(
    ("objectives", "good"),
    [("ttft:100", 1), ("ttft:99", 0), ("tpot:50", 1), ("tpot:49", 0), ("e2el:600", 1), ("e2el:599", 0)],
)
def test_each_objective_has_its_own_clock(objectives: str, good: int) -> None:
    run = made_run([request(ttft_s=0.1)])  # after the first token, 10 more come within 0.5 s
    found = summarise(run, objectives_ms=parse_objectives([objectives])).goodput
    assert found is not None
    assert found.share == good


def test_all_objectives_must_be_met_and_one_token_meets_any_tpot() -> None:
    run = made_run([request(output_tokens=1, finished_s=0.1), request(ttft_s=0.4)])
    found = summarise(run, objectives_ms=parse_objectives(["ttft:300", "tpot:10"])).goodput
    assert found is not None
    assert found.share == 0.5


def test_an_answer_without_usage_meets_no_tpot_objective() -> None:
    """Its tokens were not counted, so it may have been as slow as it likes."""
    run = made_run([request(finished_s=60.0, has_usage=False, output_tokens=0), request(turn=1)])
    assert summarise(run, objectives_ms={"tpot": 50.0}).goodput.share == 0.5  # type: ignore[union-attr]
    assert summarise(run, objectives_ms={"ttft": 500.0}).goodput.share == 1  # type: ignore[union-attr]


def test_ttft_counts_from_the_intended_send_time() -> None:
    run = made_run([request(sent_s=5.0, first_token_s=5.1, finished_s=5.2)])
    assert summarise(run, objectives_ms={"ttft": 200.0}).goodput.share == 0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("ttfb:5", "one of ttft, tpot, e2el"),
        ("ttft", "number of milliseconds"),
        ("ttft:fast", "number of milliseconds"),
        ("tpot:-1", "above 0 ms"),
        ("tpot:nan", "above 0 ms"),
    ],
)
def test_bad_objectives_are_refused(word: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_objectives([word])


def test_an_objective_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="ttft is given twice"):
        parse_objectives(["ttft:5", "ttft:6"])
    assert parse_objectives(["ttft:500", "tpot:50", "e2el:5e3"]) == {"ttft": 500, "tpot": 50, "e2el": 5000}
