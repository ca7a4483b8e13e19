"""A late generator invalidates claims that its lag could explain, and no others."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.experiment.cautions import cautions
from loadgen.experiment.contrasts import Contrasts
from loadgen.experiment.lateness import SHARE_OF_INTERVAL, allowed_shift, judged, possible_shift
from loadgen.experiment.verdict import verdict
from loadgen.result.model import Arm, Contrast, Interval
from tests.loadgen.experiment.made import BASE, arms_in, found_in, rounds_of
from tests.loadgen.measure.builders import made_run, request


def arm(name: str, ttft_ms: float, lag_ms: float) -> Arm:
    rows = [request(i, sent_s=lag_ms / 1e3, ttft_s=(ttft_ms + lag_ms) / 1e3) for i in range(10)]
    runs = [{name: made_run(rows)}]
    return arms_in(runs)[0]


def contrast(ratio: float, width: float | None, judgement: str) -> Contrast:
    """`width`: half the interval of the ratio's logarithm; None: no interval."""
    ends = (None, None) if width is None else (ratio * math.exp(-width), ratio * math.exp(width))
    interval = Interval(value=ratio, low=ends[0], high=ends[1])
    return Contrast(
        metric="ttft_mean_ms",
        better="lower",
        baseline=BASE,
        arm="arm",
        pairs=10,
        difference=Interval(value=0.0),
        ratio=interval,
        judgement=judgement,
    )


def is_valid(lag_ms: float, found: Contrast, *, base_lag_ms: float = 0.0) -> bool:
    arms = [arm(BASE, 400.0, base_lag_ms), arm("arm", 100.0, lag_ms)]
    base, other = judged(arms, Contrasts((found,)), BASE)
    assert base.summary.validity.valid, "the claim is about the other arm"
    return other.summary.validity.valid


def test_what_the_demo_measures_stands_and_a_generator_that_is_really_late_does_not() -> None:
    """The arm is 4 times as fast, known within 22 %. Lag of 1 ms in 100 cannot explain that, lag of 8 ms can."""
    claim = contrast(0.25, 0.22, "better")
    assert is_valid(1.0, claim)
    assert is_valid(2.5, claim), "the shift is small compared with the interval"
    assert not is_valid(8.0, claim)
    assert not is_valid(8.0, contrast(0.25, 2.0, "better")), "a wide interval is not an excuse"
    assert not is_valid(0.0, claim, base_lag_ms=30.0), "a late baseline makes the other arm look fast"


def test_a_comparison_that_fell_is_not_said_to_stand() -> None:
    """The baseline makes no claim of its own, so it is valid even if its lag felled the other arm's claim."""
    arms = [arm(BASE, 400.0, 30.0), arm("arm", 100.0, 0.0)]
    fallen = Contrasts((contrast(0.25, 0.22, "better"),))
    (said,) = [line for line in cautions(judged(arms, fallen, BASE), fallen, BASE, 4) if "own lag" in line]
    assert f"TTFT in {BASE}." in said
    assert "stands" not in said
    standing = Contrasts((contrast(0.25, 4.0, "not distinguishable"),))
    assert any("The comparison stands." in line for line in cautions(arms, standing, BASE, 4))


def test_the_smaller_the_effect_the_less_lag_may_be() -> None:
    assert is_valid(1.0, contrast(0.25, None, "better"))
    assert not is_valid(1.0, contrast(0.9, None, "better")), "2 % may be lag, and the effect is 10 %"
    assert is_valid(0.2, contrast(0.9, None, "better"))
    assert is_valid(1.0, contrast(0.99, None, "not distinguishable")), (
        "no difference is claimed, and 2 % would not be one"
    )
    assert not is_valid(4.0, contrast(0.99, None, "not distinguishable"))


@given(
    ratio=st.floats(0.05, 20),
    width=st.floats(0, 3) | st.none(),
    judgement=st.sampled_from(["better", "worse", "not distinguishable"]),
    lags_ms=st.tuples(st.floats(0, 100), st.floats(0, 100)),
)
@settings(deadline=None)
def test_more_lag_never_mends_a_claim(
    ratio: float, width: float | None, judgement: str, lags_ms: tuple[float, float]
) -> None:
    found = contrast(ratio, width, judgement)
    assert allowed_shift(found) <= max(0.05, min(SHARE_OF_INTERVAL * (width or 0.0) * (1 + 1e-9), 0.1))
    less, more = sorted(lags_ms)
    if not is_valid(less, found):
        assert not is_valid(more, found)


def test_what_is_allowed_leaves_the_intervals_their_coverage() -> None:
    """The true ratio is 0.5, and every TTFT of one arm is longer by the largest allowed lag. 95 % intervals still
    contain the true ratio in about 92 % of experiments."""
    random = np.random.default_rng(5)
    held, trials = 0, 4000
    for _ in range(trials):
        logs = math.log(0.5) + random.normal(0, 0.3, 40)
        half = 2.02 * logs.std(ddof=1) / math.sqrt(len(logs))  # Student's t, 39 degrees of freedom
        shift = allowed_shift(contrast(math.exp(logs.mean()), half, "better"))
        assert shift == pytest.approx(max(0.05 * abs(logs.mean()), half / 4))
        held += abs(logs.mean() + half / 4 - math.log(0.5)) <= half
    assert 0.905 <= held / trials <= 0.94


def test_the_reason_names_both_arms_and_the_remedy() -> None:
    rounds = rounds_of({BASE: 1.0, "arm": 0.5}, noise=0.02)
    late = [
        one.model_copy(
            update={
                "summary": one.summary.model_copy(update={"lag": one.summary.lag.model_copy(update={"mean_ms": 60.0})})
            }
        )
        if one.name == "arm"
        else one
        for one in arms_in(rounds)
    ]
    found = found_in(rounds)
    first, *rest = verdict(judged(late, found, BASE), found, BASE)
    assert first.startswith("INVALID: in arm the load generator was late by 60.0 ms on average, 0.0 ms in round_robin:")
    assert "Lower the rate, or give the generator its own machine" in first
    assert rest[0].startswith("arm won"), "the result is reported anyway"
    assert possible_shift(late[1].summary, late[0].summary) > 0.5
