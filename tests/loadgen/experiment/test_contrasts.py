"""Arms compared with the baseline: what is claimed, and how often the claim is wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from loadgen.experiment.bootstrap import draws
from loadgen.experiment.compared import Quantile, Ranked, compared
from loadgen.experiment.contrasts import Contraster, joint_confidence, relative_half_width
from loadgen.experiment.pairs import pair
from loadgen.result.model import Contrast
from tests.loadgen.experiment.made import BASE, Rounds, arms_in, drawn_pairs, found_in, rounds_of
from tests.loadgen.measure.builders import failed, made_run, request


def mean_contrast(rounds: Rounds, seed: int = 1) -> Contrast:
    pairs = pair(rounds)
    assert pairs is not None
    baseline, *others = rounds[0]
    found = Contraster(pairs, 2, seed).contrasts(compared(False)[0], baseline, others)
    return found[others[0]]


def drawn_contrast(factor: float, *, seed: int, **law: float) -> Contrast:
    pairs = drawn_pairs(factor, seed=seed, **law)  # type: ignore[arg-type]
    # A seed different from that of the data, so that one random stream does not decide both data and resamples.
    return Contraster(pairs, 2, 10_000 + seed).contrasts(compared(False)[0], BASE, ["arm"])["arm"]


@settings(max_examples=10, deadline=None)
@given(factor=st.floats(0.2, 5), rounds=st.integers(1, 4))
def test_a_constant_factor_is_found_exactly_in_every_metric_of_ttft(factor: float, rounds: int) -> None:
    assume(abs(abs(math.log(factor)) - math.log(1.05)) > 1e-6)  # on the border, rounding decides
    made = rounds_of({BASE: 1.0, "arm": factor}, rounds=rounds)
    found = found_in(made)
    expected = "not distinguishable" if 1 / 1.05 < factor < 1.05 else "better" if factor < 1 else "worse"
    for metric in ("ttft_mean_ms", "ttft_median_ms"):
        contrast = found.of("arm", metric)
        assert contrast is not None
        ratio = contrast.ratio
        assert (ratio.value, ratio.low, ratio.high) == pytest.approx((factor, factor, factor))
        assert contrast.judgement == expected
    mean, base = found.of("arm"), arms_in(made)[0].summary.ttft.mean_ms
    assert mean is not None
    assert base is not None
    assert mean.difference.value == pytest.approx((factor - 1) * base)


def test_the_mirror_image_is_the_inverse() -> None:
    rounds = rounds_of({BASE: 1.0, "arm": 0.5}, noise=0.3)
    there = mean_contrast(rounds)
    back = mean_contrast([{"arm": runs["arm"], BASE: runs[BASE]} for runs in rounds])
    assert back.ratio.value == pytest.approx(1 / there.ratio.value)
    assert there.ratio.high is not None
    assert back.ratio.low == pytest.approx(1 / there.ratio.high)
    assert (there.judgement, back.judgement) == ("better", "worse")
    assert there.difference.value == pytest.approx(-back.difference.value)


@pytest.mark.parametrize(
    ("rounds", "round_noise"),
    # One round cannot show differences between whole blocks.
    [(1, 0.0), (2, 0.05), (4, 0.1)],
)
def test_noise_alone_is_rarely_called_better_or_worse(rounds: int, round_noise: float) -> None:
    """10 of 200 claims (5 %) are expected to be wrong; 14 are allowed (7 %)."""
    wrong = sum(
        drawn_contrast(1.0, rounds=rounds, sessions=20, noise=0.4, round_noise=round_noise, seed=seed).judgement
        != "not distinguishable"
        for seed in range(200)
    )
    assert wrong <= 14


def test_the_interval_holds_the_true_ratio() -> None:
    held = 0
    for seed in range(100):
        ratio = drawn_contrast(0.7, rounds=2, sessions=40, noise=0.4, round_noise=0.05, seed=seed).ratio
        assert ratio.low is not None
        assert ratio.high is not None
        held += ratio.low <= 0.7 <= ratio.high
    assert held >= 90


def test_a_real_effect_is_found_though_blocks_differ() -> None:
    found = [
        drawn_contrast(0.6, rounds=4, sessions=40, noise=0.4, round_noise=0.05, seed=seed).judgement
        for seed in range(30)
    ]
    assert found.count("better") >= 27


def test_rounds_that_differ_widen_the_interval() -> None:
    alike = relative_half_width(mean_contrast(rounds_of({BASE: 1.0, "arm": 0.7}, rounds=4, noise=0.1)))
    apart = relative_half_width(mean_contrast(rounds_of({BASE: 1.0, "arm": 0.7}, rounds=4, noise=0.1, round_noise=0.3)))
    assert apart > 2 * alike


def test_more_arms_tell_more_of_how_blocks_differ() -> None:
    """Two rounds of two arms give one degree of freedom; two rounds of four arms give three."""

    def width(factors: dict[str, float]) -> float:
        made = (rounds_of(factors, round_noise=0.2, noise=0.1, seed=seed) for seed in range(12))
        others = [arm for arm in factors if arm != BASE]
        contrasters = (Contraster(pairs, 2, 1) for rounds in made if (pairs := pair(rounds)))
        found = [contraster.contrasts(compared(False)[0], BASE, others)["arm"] for contraster in contrasters]
        return float(np.median([relative_half_width(contrast) for contrast in found]))

    arms = {BASE: 1.0, "arm": 0.5}
    assert width({**arms, "c": 1.0, "d": 1.0}) < width(arms) / 2


def test_more_arms_ask_for_more_confidence() -> None:
    assert joint_confidence(2) == pytest.approx(0.95)
    assert joint_confidence(4) == pytest.approx(1 - 0.05 / 3)
    rounds = rounds_of({BASE: 1.0, "arm": 0.8}, noise=0.4)
    pairs = pair(rounds)
    assert pairs is not None
    two, four = (Contraster(pairs, arms, 1).contrasts(compared(False)[0], BASE, ["arm"])["arm"] for arms in (2, 4))
    assert relative_half_width(four) > relative_half_width(two)


def test_a_failed_request_leaves_the_means_and_is_infinite_in_ranks() -> None:
    """The arm fails the slowest requests, so its other requests look faster than they are."""
    slow: dict[str, Any] = {"ttft_s": 10.0}
    base = made_run([request(i, **({} if i < 90 else slow)) for i in range(100)])
    arm = made_run([request(i) if i < 90 else failed(i) for i in range(100)])
    found = found_in([{BASE: base, "arm": arm}])
    mean, median = found.of("arm"), found.of("arm", "ttft_median_ms")
    assert mean is not None
    assert median is not None
    assert (mean.pairs, mean.ratio.value) == pytest.approx((90, 1.0))
    assert (median.pairs, median.ratio.value) == pytest.approx((100, 1.0))
    assert found.of("arm", "ttft_p99_ms") is None
    assert any(
        line.startswith("arm: no comparison with round_robin in ttft_p99_ms: ") and "infinite" in line
        for line in found.missing
    )


def test_follow_ups_that_never_came_count_as_failed_ones_do() -> None:
    base = made_run([request(i, turn) for i in range(20) for turn in range(3)])
    arm = made_run([r for i in range(20) for r in (request(i, 0), failed(i, 1))], planned=60)
    found = found_in([{BASE: base, "arm": arm}], {"ttft": 1000.0})
    share = found.of("arm", "goodput_share")
    assert share is not None
    assert share.pairs == 60
    assert share.ratio.value == pytest.approx(1 / 3)
    assert share.judgement == "worse"
    assert found.of("arm", "ttft_median_ms") is None


def test_sessions_that_one_arm_never_began_are_no_pairs() -> None:
    base = made_run([request(i) for i in range(40)])
    arm = made_run([request(i) for i in range(30)], planned=40)
    found = found_in([{BASE: base, "arm": arm}])
    median = found.of("arm", "ttft_median_ms")
    assert median is not None
    assert median.pairs == 30


def test_percentiles_of_few_requests_and_blocks_of_one_round_have_no_interval() -> None:
    found = found_in(rounds_of({BASE: 1.0, "arm": 0.5}, rounds=1, noise=0.2))
    p99, throughput = found.of("arm", "ttft_p99_ms"), found.of("arm", "request_throughput")
    for contrast in (p99, throughput):
        assert contrast is not None
        assert (contrast.ratio.low, contrast.difference.high) == (None, None)
        assert contrast.judgement == "not distinguishable"
    assert relative_half_width(p99) == float("inf")


def test_throughput_is_resampled_by_rounds() -> None:
    rounds = []
    for number in range(4):
        base = made_run([request(i) for i in range(20)], duration_s=10.0 + number / 100)
        arm = made_run([request(i) for i in range(20)], duration_s=5.0 - number / 100)
        rounds.append({BASE: base, "arm": arm})
    found = found_in(rounds).of("arm", "request_throughput")
    assert found is not None
    assert found.judgement == "better"
    assert found.ratio.low is not None
    assert found.ratio.high is not None
    assert found.ratio.value == pytest.approx(10.015 / 4.985)
    assert found.ratio.low < found.ratio.value < found.ratio.high


def test_what_was_not_measured_is_missing_and_not_equal() -> None:
    silent: dict[str, Any] = {"has_usage": False, "prompt_tokens": 0, "cached_tokens": 0}
    found = found_in(rounds_of({BASE: 1.0, "arm": 0.5}, **silent))
    assert found.of("arm", "cached_token_rate") is None
    assert any("no comparison with round_robin in cached_token_rate: " in line for line in found.missing)


def test_nothing_in_common() -> None:
    down = made_run([failed(i) for i in range(5)])
    found = found_in([{BASE: made_run([request(i) for i in range(5)]), "arm": down}])
    assert found.of("arm") is None
    assert pair([{BASE: made_run([]), "arm": made_run([])}]) is None


def test_arms_that_cannot_be_told_from_the_best_are_ties() -> None:
    found = found_in(rounds_of({BASE: 1.0, "fast": 0.25, "same": 0.2501, "slow": 0.7}, noise=0.05))
    assert {found.best, *found.ties} == {"fast", "same"}


@settings(max_examples=30, deadline=None)
@given(
    base=st.lists(st.floats(0.001, 100), min_size=1, max_size=200),
    failures=st.integers(0, 20),
    q=st.sampled_from([0.5, 0.9, 0.99]),
)
def test_ranked_quantiles_are_those_of_the_values(base: list[float], failures: int, q: float) -> None:
    values = np.array(base + [math.inf] * failures)
    ranked = Ranked((values, values), np.zeros(len(values), np.int64), 1)
    found = Quantile(ranked, q).values(np.ones((1, 1)))[0][0]
    assert found == pytest.approx(np.quantile(values, q, method="inverted_cdf"))


def test_many_values_are_binned_closely() -> None:
    values = np.random.default_rng(1).lognormal(0, 1, 50_000)
    unit = np.arange(50_000) % 100
    ranked = Ranked((values, values * 2), unit, 100)
    for q in (0.5, 0.9, 0.99):
        base, arm = Quantile(ranked, q).values(np.ones((1, 100)))
        assert base[0] == pytest.approx(np.quantile(values, q), rel=0.01)
        assert arm[0] == pytest.approx(np.quantile(values * 2, q), rel=0.01)


def test_very_many_sessions_are_resampled_in_groups() -> None:
    run = made_run([request(i) for i in range(3000)])
    pairs = pair([{BASE: run, "arm": run}, {BASE: run, "arm": run}])
    assert pairs is not None
    assert len(pairs.round_of) == 600
    assert np.bincount(pairs.unit).tolist() == [10] * 600


def test_every_resample_has_as_many_sessions_as_its_rounds() -> None:
    round_of = np.repeat([0, 1, 2], [5, 10, 5])
    drawn = draws(round_of, 3)
    per_round = np.array([drawn.weights[:, round_of == r].sum(axis=1) for r in range(3)]).T / [5, 10, 5]
    assert (per_round.sum(axis=1) == 3).all()
    assert (per_round == np.round(per_round)).all()
    for r, weights in enumerate(drawn.within):
        assert (weights[:, round_of != r] == 0).all()
        assert (weights.sum(axis=1) == [5, 10, 5][r]).all()
