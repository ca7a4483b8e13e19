"""A sweep over rates: each arm at increasing rates, up to the knee of its curve."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from loadgen.commands.simulate_result import ISOLATION, METHOD, facts, model_name, play_watched
from loadgen.experiment.cautions import cautions
from loadgen.experiment.contrasts import Contrasts
from loadgen.load.arrivals import ArrivalKind, ArrivalSpec, mean_turns
from loadgen.load.progress import Progress
from loadgen.measure.definitions import DEFINITIONS
from loadgen.measure.summary import summarise
from loadgen.result.model import Arm, Result, Summary, SweepPoint
from loadgen.simulate.scenario import Scenario, SimulatedRun
from loadgen.sweep.saturation import MIN_ACHIEVED_SHARE, achieved_share, reason
from loadgen.sweep.search import Search

LATENCIES = 10
"""Least duration of a step, in median end-to-end latencies of the step below: a fleet that fills up looks saturated. A
step that looks saturated and was shorter than this many of its own latencies is played again for that long."""
OVERLOADED = 3.0
"""A step is not played again if its latency is over this many times that of the step below: a fleet that only fills up
slows down less."""


@dataclass(frozen=True, slots=True)
class RateSweep:
    """What the sweep tries. Rates are requests per second."""

    rates: Sequence[float]
    """Empty: the rate doubles from `start`, then the gap is bisected."""
    start: float
    precision: float
    point_s: float


@dataclass(slots=True)
class _Curve:
    arm: str
    search: Search
    points: list[SweepPoint] = field(default_factory=list)
    reasons: dict[float, str] = field(default_factory=dict)
    wanted_s: dict[float, float] = field(default_factory=dict)
    """Rate -> least duration of its step in seconds, if the workload has too few sessions for it."""


def simulate_sweep(
    scenario: Scenario,
    arms: Sequence[str],
    sweep: RateSweep,
    configuration: Mapping[str, Any],
    progress: Progress,
) -> Result:
    """Return every arm's curve. An arm's own numbers are those of its knee, or of its lowest step if that saturates.

    Ctrl-C ends it early: the steps that have been played count.
    """
    curves: list[_Curve] = []
    is_partial = False
    try:
        for arm in arms:
            curves.append(_Curve(arm, Search(sweep.start, sweep.precision, sweep.rates)))
            _fill(curves[-1], scenario, sweep, progress)
    except KeyboardInterrupt:
        is_partial = True
        curves = [curve for curve in curves if curve.points]
        if not curves:
            raise
    made = tuple(_arm(curve) for curve in curves)
    points = [_brief(p) for curve in curves for p in sorted(curve.points, key=_rate)]
    return Result(
        command="simulate",
        created=datetime.now().astimezone().isoformat(timespec="seconds"),
        model=model_name(scenario),
        seed=scenario.seed,
        configuration=dict(configuration),
        workload={"name": scenario.workload.name, **scenario.workload.about()},
        facts={**facts([scenario]), "arrivals": "Poisson, at the rate of each step"},
        isolation=ISOLATION,
        baseline=made[0].name,
        arms=made,
        sweep=tuple(points),
        partial=is_partial,
        verdict=tuple(_verdict(curve) for curve in curves),
        cautions=(
            *_cut_short(curves, is_partial),
            *cautions(made, Contrasts(()), made[0].name, 4),
            *_short(curves, scenario.workload.length),
        ),
        definitions={**DEFINITIONS, **METHOD, "knee": "the highest rate below every one that saturates the fleet"},
    )


def _cut_short(curves: Sequence[_Curve], is_partial: bool) -> tuple[str, ...]:
    if not is_partial:
        return ()
    points = ", ".join(f"{len(curve.points)} of {curve.arm}" for curve in curves)
    return (f"PARTIAL: stopped early, after these steps: {points}.",)


def _fill(curve: _Curve, scenario: Scenario, sweep: RateSweep, progress: Progress) -> None:
    """Play the steps of an arm."""
    arm = curve.arm
    length = scenario.workload.length
    turns = mean_turns(scenario.workload, scenario.sessions)
    requests = math.inf if length is None else length * turns

    def played(rate: float, step_s: float) -> tuple[SimulatedRun, Summary]:
        # Requests are due during the whole step, so that a queue has time to grow visibly.
        sessions = max(scenario.sessions, math.ceil(rate * step_s / turns))
        step = replace(scenario, arrivals=ArrivalSpec(ArrivalKind.POISSON, rate / turns), sessions=sessions)
        progress.note(f"{arm}: {rate:g} requests/s")
        run = play_watched(step, arm, progress)
        return run, summarise(run, scenario.pods())

    while (rate := _next(curve, sweep.point_s, requests)) is not None:
        run, summary = played(rate, _step_s(curve, rate, sweep.point_s))
        if (longer_s := _longer_s(curve, rate, run, summary)) is not None:
            if rate * longer_s > requests:
                curve.wanted_s[rate] = longer_s
            else:
                run, summary = played(rate, longer_s)
        lower = sorted((point for point in curve.points if _rate(point) < rate), key=_rate)
        why = reason(summary, run.records, lower, 0.0)
        if why:
            curve.reasons[rate] = why
        curve.search.add(rate, saturated=bool(why))
        curve.points.append(SweepPoint(arm=arm, rate=rate, concurrency=None, summary=summary, saturated=bool(why)))


def _next(curve: _Curve, point_s: float, requests: float) -> float | None:
    """Return the rate to try; None: the knee is known, or higher rates need more than the workload's `requests`."""
    search = curve.search
    rate = search.next()
    if rate is None or rate * (wanted_s := _step_s(curve, rate, point_s)) <= requests:
        return rate
    curve.wanted_s[rate] = wanted_s
    if search.steps or search.bad is not None:
        return rate  # the user gave the rate, or it is below a rate that was tried
    most = float(f"{requests / wanted_s:.4g}")
    return most if most > (search.good or 0.0) else None


def _step_s(curve: _Curve, rate: float, point_s: float) -> float:
    """Return the least duration in seconds of a step at this rate."""
    return max(point_s, LATENCIES * _latency_below_s(curve, rate))


def _longer_s(curve: _Curve, rate: float, run: SimulatedRun, summary: Summary) -> float | None:
    """Return the seconds for which the step is played again if the fleet may only have filled up; None: the result
    stands."""
    latency_s, below_s = (summary.e2e.median_ms or 0.0) / 1e3, _latency_below_s(curve, rate)
    longer_s = LATENCIES * latency_s
    if achieved_share(run.records) >= MIN_ACHIEVED_SHARE or latency_s > OVERLOADED * below_s:
        return None
    return longer_s if longer_s > float(run.records.intended_s.max()) else None


def _latency_below_s(curve: _Curve, rate: float) -> float:
    """Return the median end-to-end latency in seconds of the next lower step; 0 if there is none."""
    below = max((point for point in curve.points if _rate(point) < rate), key=_rate, default=None)
    return (below.summary.e2e.median_ms or 0.0) / 1e3 if below else 0.0


def _short(curves: Sequence[_Curve], length: int | None) -> Iterator[str]:
    for curve in curves:
        short = [rate for rate in curve.wanted_s if rate in curve.search.tried]
        if short:
            rates = ", ".join(f"{rate:g}" for rate in sorted(short))
            yield (
                f"{curve.arm}: at {rates} requests/s the workload's {length:,} sessions last less than the"
                f" {curve.wanted_s[max(short)]:.0f} s that a step should: too short to see a queue grow."
            )
        elif curve.wanted_s:
            yield (
                f"{curve.arm}: no higher rate was tried, since the workload's {length:,} sessions would last less than"
                f" the {min(curve.wanted_s.values()):.0f} s that a step should: a larger workload shows the knee."
            )


def _rate(point: SweepPoint) -> float:
    return point.rate or 0.0


def _arm(curve: _Curve) -> Arm:
    knee = curve.search.good
    lowest = min(curve.points, key=_rate)
    point = next((p for p in curve.points if p.rate == knee), lowest)
    return Arm(name=curve.arm, url="", policy=curve.arm, summary=point.summary)


def _brief(point: SweepPoint) -> SweepPoint:
    return point.model_copy(update={"summary": point.summary.model_copy(update={"series": None})})


def _verdict(curve: _Curve) -> str:
    good, bad = curve.search.good, curve.search.bad
    why = "" if bad is None else f"{bad:g} requests/s saturate it ({curve.reasons[bad]})"
    if good is None:
        return f"{curve.arm} keeps up with no rate that was tried: {why}."
    if bad is None:
        return f"{curve.arm} keeps up with {good:g} requests/s, the highest rate that was tried."
    return f"{curve.arm} keeps up with {good:g} requests/s; {why}."
