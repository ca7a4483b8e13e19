"""`--sweep rate`: each arm at higher and higher rates, to the knee of its curve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from loadgen.commands.saturation import reason
from loadgen.commands.search import Search
from loadgen.commands.simulate_result import ISOLATION, METHOD, facts, model_name, play_watched
from loadgen.experiment.cautions import cautions
from loadgen.experiment.contrasts import Contrasts
from loadgen.load.arrivals import ArrivalKind, ArrivalSpec, mean_turns
from loadgen.load.progress import Progress
from loadgen.measure.definitions import DEFINITIONS
from loadgen.measure.summary import summarise
from loadgen.result.model import Arm, Result, SweepPoint
from loadgen.simulate.scenario import Scenario


@dataclass(frozen=True, slots=True)
class RateSweep:
    """What is tried. Rates are requests per second."""

    rates: Sequence[float]
    """Empty: doubled from `start`, then bisected."""
    start: float
    precision: float
    point_s: float
    ttft_growth: float


@dataclass(slots=True)
class _Curve:
    arm: str
    search: Search
    points: list[SweepPoint] = field(default_factory=list)
    reasons: dict[float, str] = field(default_factory=dict)


def simulate_sweep(
    scenario: Scenario,
    arms: Sequence[str],
    sweep: RateSweep,
    configuration: Mapping[str, Any],
    progress: Progress,
) -> Result:
    """Every arm's curve. An arm's own numbers are those of its knee, or of its lowest step if that saturates."""
    curves = [_curve(scenario, arm, sweep, progress) for arm in arms]
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
        baseline=arms[0],
        arms=made,
        sweep=tuple(points),
        verdict=tuple(_verdict(curve) for curve in curves),
        cautions=cautions(made, Contrasts(()), arms[0], 4),
        definitions={**DEFINITIONS, **METHOD, "knee": "the highest rate below every one that saturates the fleet"},
    )


def _curve(scenario: Scenario, arm: str, sweep: RateSweep, progress: Progress) -> _Curve:
    curve = _Curve(arm, Search(sweep.start, sweep.precision, sweep.rates))
    turns = mean_turns(scenario.workload, scenario.sessions)
    while (rate := curve.search.next()) is not None:
        # As many requests as are due in `point_s`, so that a queue has the time to show that it grows.
        sessions = max(scenario.sessions, math.ceil(rate * sweep.point_s / turns))
        step = replace(scenario, arrivals=ArrivalSpec(ArrivalKind.POISSON, rate / turns), sessions=sessions)
        progress.note(f"{arm}: {rate:g} requests/s")
        run = play_watched(step, arm, progress)
        summary = summarise(run, scenario.pods())
        lower = sorted((point for point in curve.points if _rate(point) < rate), key=_rate)
        why = reason(summary, run.records, lower, 0.0, sweep.ttft_growth)
        if why:
            curve.reasons[rate] = why
        curve.search.add(rate, saturated=bool(why))
        curve.points.append(SweepPoint(arm=arm, rate=rate, concurrency=None, summary=summary, saturated=bool(why)))
    return curve


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
