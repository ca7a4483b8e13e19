"""What the report claims: only what the requests show."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from loadgen.verdict import Judgement, contrast, contrasts, verdict


def records(make_record, factor: float = 1.0, sessions: int = 30, noise_seed: int | None = None, **fields: object):
    rng, noise = random.Random(5), random.Random(noise_seed)
    out = []
    for session in range(sessions):
        for turn in range(3):
            ttft_s = rng.uniform(0.1, 1.0) * factor
            if noise_seed is not None:
                ttft_s *= noise.lognormvariate(0, 0.6)
            out.append(make_record(session, turn, ttft_s, intended_s=float(session), **fields))
    return out


@settings(max_examples=20)
@given(factor=st.floats(0.2, 5))
def test_a_constant_factor_is_found_exactly(make_record, make_comparison, factor: float):
    assume(abs(abs(math.log(factor)) - math.log(1.05)) > 1e-6)  # on the border, rounding decides
    comparison = make_comparison(
        {"round_robin": records(make_record), "predicted_ttft": records(make_record, 1 / factor)}
    )
    (found,) = contrasts(comparison)
    assert (found.speedup, found.low, found.high) == pytest.approx((factor, factor, factor))
    if 1 / 1.05 < factor < 1.05:
        assert found.judgement is Judgement.EQUAL
    else:
        assert found.judgement is (Judgement.BETTER if factor > 1 else Judgement.WORSE)
    back = contrast(comparison.arms[0], comparison.arms[1], 1)
    assert back.speedup == pytest.approx(1 / factor)


def test_noise_alone_is_not_distinguishable(make_record, make_comparison):
    comparison = make_comparison(
        {"round_robin": records(make_record, noise_seed=1), "least_loaded": records(make_record, noise_seed=2)}
    )
    (found,) = contrasts(comparison)
    assert found.low < 1 < found.high
    assert found.judgement is Judgement.EQUAL
    assert verdict(comparison)[0].startswith("No policy was distinguishably faster than round_robin here.")


def test_the_winner_its_numbers_and_ties_are_named(make_record, make_comparison):
    lines = verdict(
        make_comparison(
            {
                "round_robin": records(make_record),
                "predicted_ttft": records(make_record, 0.25, cached_tokens=90),
                "affinity_groups": records(make_record, 0.2501),
                "least_loaded": records(make_record, 2.0),
            }
        )
    )
    assert lines[0].startswith("predicted_ttft leads: mean TTFT ")
    assert "4.0 times as fast" in lines[0]
    assert "90% of the prompt tokens against 40%" in lines[0]
    assert lines[0].endswith("affinity_groups cannot be told from it.")
    assert [line.split(" (")[0] for line in lines[1:]] == [
        "affinity_groups: better than round_robin",
        "least_loaded: worse than round_robin",
    ]


@pytest.mark.parametrize(
    ("base_cached", "other_cached", "reason"),
    [(95, 96, "already found 95%"), (2, 3, "share too little"), (40, 90, "Reuse rose from 40% to 90%")],
)
def test_no_gain_is_explained(make_record, make_comparison, base_cached: int, other_cached: int, reason: str):
    arms = {
        "round_robin": records(make_record, cached_tokens=base_cached),
        "predicted_ttft": records(make_record, cached_tokens=other_cached),
    }
    assert reason in verdict(make_comparison(arms))[0]


def test_failures_and_a_late_generator_are_said_aloud(make_record, make_comparison):
    failed = [make_record(100, 0, failure="http 503"), make_record(101, 0, failure="timeout")]
    late = records(make_record, 0.5, sent_s=1000.0)
    lines = verdict(make_comparison({"round_robin": records(make_record), "cache_aware": late + failed}, planned=95))
    assert "Caution: cache_aware failed 2 of 95 requests (1 http 503, 1 timeout) and left 3 unsent" in "\n".join(lines)
    assert any(line.startswith("Caution: in cache_aware the load generator itself was late") for line in lines)


def test_answers_that_end_later_are_said_aloud(make_record, make_comparison):
    late = records(make_record, 0.5, finished_s=100.0)
    lines = verdict(make_comparison({"round_robin": records(make_record), "cache_aware": late}))
    assert any(line.startswith("Caution: cache_aware begins its answers sooner but ends them later") for line in lines)


def test_without_a_common_request_nothing_is_claimed(make_record, make_comparison):
    down = [make_record(session, 0, failure="http 503") for session in range(5)]
    lines = verdict(make_comparison({"round_robin": records(make_record), "cache_aware": down}))
    assert lines[0].startswith("No policy was distinguishably faster")
    assert "cache_aware: no request completed in both arms, so it cannot be judged." in lines


def test_one_arm_alone(make_record, make_comparison):
    assert "nothing to compare" in verdict(make_comparison({"cache_aware": records(make_record)}))[0]
