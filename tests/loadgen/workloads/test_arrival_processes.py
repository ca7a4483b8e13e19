"""Arrival processes: mean rate and spread as requested, equal times for equal seeds, unsuitable flags refused."""

from __future__ import annotations

import itertools
import math
import pickle
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.common.settings import ConfigError
from loadgen.load.arrivals import ArrivalKind, ArrivalSettings, ArrivalSpec, check_times, mean_turns, start_times_s
from tests.loadgen.workloads.samples import sample

COUNT = 4000
OPEN = [
    ArrivalSpec(ArrivalKind.POISSON, 5.0),
    ArrivalSpec(ArrivalKind.GAMMA, 5.0, burstiness=0.25),
    ArrivalSpec(ArrivalKind.GAMMA, 5.0, burstiness=4.0),
    ArrivalSpec(ArrivalKind.GAMMA, 5.0, burstiness=math.inf),
    ArrivalSpec(ArrivalKind.CONSTANT, 5.0),
    ArrivalSpec(ArrivalKind.BURST, 5.0, burst_size=8),
    ArrivalSpec(ArrivalKind.USERS, num_users=20, user_gap_s=4.0),
    ArrivalSpec(ArrivalKind.RAMP, ramp_start=5.0, ramp_end=5.0, ramp_s=3.0),
]
RATES = st.floats(0.01, 1000)


def times(spec: ArrivalSpec, seed: int = 1, count: int = COUNT) -> list[float]:
    return list(itertools.islice(start_times_s(spec, seed), count))


def variation(starts: Sequence[float]) -> float:
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    return statistics.pstdev(gaps) / statistics.mean(gaps)


@pytest.mark.parametrize("spec", OPEN, ids=lambda spec: f"{spec.kind}-{spec.burstiness:g}")
def test_mean_rate_is_as_asked(spec: ArrivalSpec) -> None:
    starts = times(spec)
    # The standard error of the mean gap is its coefficient of variation / sqrt(COUNT): at most 3 % here.
    assert COUNT / starts[-1] == pytest.approx(5.0, rel=0.1)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (OPEN[0], 1.0),
        (OPEN[1], 2.0),
        (OPEN[2], 0.5),
        (OPEN[3], 0.0),
        (OPEN[4], 0.0),
        (OPEN[5], math.sqrt(7)),
        (ArrivalSpec(ArrivalKind.RAMP, burstiness=0.25, ramp_start=2, ramp_end=2), 2.0),
    ],
    ids=str,
)
def test_gaps_vary_as_asked(spec: ArrivalSpec, expected: float) -> None:
    assert variation(times(spec)) == pytest.approx(expected, rel=0.12, abs=1e-6)


@given(
    kind=st.sampled_from([kind for kind in ArrivalKind if kind not in (ArrivalKind.CLOSED, ArrivalKind.TRACE)]),
    rate=RATES,
    burstiness=st.floats(0.05, 1e6) | st.just(math.inf),
    ramp=st.tuples(RATES, RATES, st.floats(0.1, 1000), st.sampled_from(["linear", "exponential"])),
    users=st.tuples(st.integers(1, 50), st.floats(0.1, 100)),
    seed=st.integers(0, 10**6),
)
def test_starts_ascend_from_zero_and_are_the_same_for_the_same_seed(
    kind: ArrivalKind, rate: float, burstiness: float, ramp: tuple[Any, ...], users: tuple[int, float], seed: int
) -> None:
    spec = ArrivalSpec(
        kind,
        rate,
        burst_size=3,
        burstiness=burstiness,
        ramp_start=ramp[0],
        ramp_end=ramp[1],
        ramp_s=ramp[2],
        ramp_strategy=ramp[3],
        num_users=users[0],
        user_gap_s=users[1],
    )
    starts = times(spec, seed, 60)
    assert starts[0] >= 0
    assert starts == sorted(starts)
    assert all(map(math.isfinite, starts))
    assert times(pickle.loads(pickle.dumps(spec)), seed, 60) == starts
    assert times(spec, seed, 20) == starts[:20]


def test_another_seed_gives_other_times() -> None:
    for spec in (OPEN[0], OPEN[1], OPEN[6]):
        assert times(spec, 1, 20) != times(spec, 2, 20)


@pytest.mark.parametrize("kind", [ArrivalKind.POISSON, ArrivalKind.GAMMA, ArrivalKind.CONSTANT, ArrivalKind.BURST])
def test_an_infinite_rate_is_everything_at_once(kind: ArrivalKind) -> None:
    assert times(ArrivalSpec(kind, math.inf, burst_size=3), count=50) == [0.0] * 50


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
@pytest.mark.parametrize(("start", "end"), [(1.0, 20.0), (20.0, 1.0), (3.0, 3.0)])
def test_a_ramp_has_the_rate_of_each_moment_and_keeps_the_last(strategy: Any, start: float, end: float) -> None:
    spec = ArrivalSpec(
        ArrivalKind.RAMP, burstiness=math.inf, ramp_strategy=strategy, ramp_start=start, ramp_end=end, ramp_s=100.0
    )
    starts = times(spec)
    for moment_s in (10.0, 50.0, 90.0, 150.0):
        progress = min(1.0, moment_s / 100)
        rate = start + (end - start) * progress if strategy == "linear" else start * (end / start) ** progress
        seen = sum(abs(time_s - moment_s) < 5 for time_s in starts) / 10
        assert seen == pytest.approx(rate, rel=0.05, abs=0.11)


def test_a_linear_ramp_may_begin_at_nothing() -> None:
    spec = ArrivalSpec(ArrivalKind.RAMP, burstiness=math.inf, ramp_start=0.0, ramp_end=10.0, ramp_s=10.0)
    assert times(spec, count=51)[-1] == pytest.approx(10.0)
    assert times(spec, count=61)[-1] == pytest.approx(11.0)


def test_each_user_keeps_the_gap() -> None:
    spec = ArrivalSpec(ArrivalKind.USERS, num_users=7, user_gap_s=3.0)
    starts = times(spec, count=70)
    for user in range(7):
        assert [b - a for a, b in itertools.pairwise(starts[user::7])] == pytest.approx([3.0] * 9)
    assert 0 <= starts[0] < starts[6] < 3.0


def test_bursts_come_together() -> None:
    assert times(ArrivalSpec(ArrivalKind.BURST, 2.0, burst_size=4), count=9) == [0.0] * 4 + [2.0] * 4 + [4.0]


@pytest.mark.parametrize("kind", [ArrivalKind.CLOSED, ArrivalKind.TRACE])
def test_closed_loop_and_trace_have_no_times_of_their_own(kind: ArrivalKind) -> None:
    with pytest.raises(ValueError, match=f"{kind} has no start times"):
        start_times_s(ArrivalSpec(kind), 1)


def test_a_trace_needs_a_workload_with_times() -> None:
    check_times(ArrivalSpec(ArrivalKind.POISSON), sample("tenants"))
    with pytest.raises(ValueError, match=r"--arrival trace needs .* --workload tenants has none"):
        check_times(ArrivalSpec(ArrivalKind.TRACE), sample("tenants"))


def load(*flags: str) -> ArrivalSettings:
    return ArrivalSettings.load(flags, prog="loadgen", environ={})


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", ArrivalSpec(ArrivalKind.POISSON, 1.0)),
        ("--session-rate 3", ArrivalSpec(ArrivalKind.POISSON, 3.0)),
        ("--request-rate 6", ArrivalSpec(ArrivalKind.POISSON, 2.0)),
        ("--request-rate inf", ArrivalSpec(ArrivalKind.POISSON, math.inf)),
        ("--request-rate 6 --burstiness 0.5", ArrivalSpec(ArrivalKind.GAMMA, 2.0, burstiness=0.5)),
        ("--burstiness inf", ArrivalSpec(ArrivalKind.GAMMA, 1.0, burstiness=math.inf)),
        ("--arrival burst", ArrivalSpec(ArrivalKind.BURST, 1.0, burst_size=10)),
        ("--burst-size 4", ArrivalSpec(ArrivalKind.BURST, 1.0, burst_size=4)),
        ("--concurrency 4", ArrivalSpec(ArrivalKind.CLOSED, concurrency=4)),
        ("--num-users 4 --session-rate 2", ArrivalSpec(ArrivalKind.USERS, 2.0, num_users=4, user_gap_s=2.0)),
        (
            "--ramp-up-strategy exponential --ramp-up-start-rps 3 --ramp-up-end-rps 6 --ramp-s 9 --burstiness 2",
            ArrivalSpec(
                ArrivalKind.RAMP, burstiness=2, ramp_strategy="exponential", ramp_start=1, ramp_end=2, ramp_s=9
            ),
        ),
    ],
)
def test_flags_say_how_sessions_arrive(flags: str, expected: ArrivalSpec) -> None:
    spec = load(*flags.split()).arrivals(turns_per_session=3.0)
    assert spec.about() == expected.about()
    if spec.kind not in (ArrivalKind.CLOSED, ArrivalKind.TRACE):
        assert times(spec, count=50) == times(expected, count=50)
    else:
        assert spec.concurrency == expected.concurrency


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--arrival poisson --num-users 3", "--num-users is a flag of --arrival users, not of poisson"),
        ("--arrival closed --session-rate 3", "--session-rate is a flag of .*, not of closed"),
        ("--arrival trace --request-rate 3", "--request-rate is a flag of .*, not of trace"),
        ("--burst-size 3 --burstiness 2", "--burst-size is a flag of --arrival burst, not of gamma"),
        ("--session-rate 3 --request-rate 3", "--session-rate and --request-rate exclude each other"),
        ("--ramp-up-strategy exponential --ramp-up-start-rps 0", "--ramp-up-start-rps must be above 0"),
        ("--arrival ramp --ramp-s inf", "--ramp-s must be finite"),
        ("--session-rate 0", "--session-rate: got '0'"),
        ("--num-users 3 --request-rate inf", "--arrival users needs a finite --session-rate or --request-rate"),
    ],
)
def test_flags_that_do_not_fit_are_refused_by_name(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*flags.split())


def test_mean_turns_is_of_the_sessions_there_are() -> None:
    assert mean_turns(sample("gsp"), 10_000) == 1.0
    assert mean_turns(sample("diverse"), 5) == 1.0
    assert 2 < mean_turns(sample("tenants"), 500) < 4
